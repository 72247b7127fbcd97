"""Everything that proposes tokens, and the tree in which it proposes them."""
