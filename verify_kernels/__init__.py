"""The operations of the verify pass: one torch reference each, and faster implementations behind one dispatch point."""
