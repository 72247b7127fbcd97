// Norms, gated activation, rotary embedding with the paged write: a few microseconds each, on the calling thread.
#include "simd.cpp"

namespace {

// out = round(x / rms(x) * weight) for one row of h elements.
template <class E>
void norm_row(const E* x, const E* weight, E* out, size_t h, float eps) {
    vf squares{};
    size_t i = 0;
    for (; i + CHUNK <= h; i += CHUNK) {
        vf a = half<0>(x + i), b = half<1>(x + i);
        squares += a * a;
        squares += b * b;
    }
    float sums[4], rest = 0.0f;
    sum4(squares, squares, squares, squares, sums);
    for (size_t j = i; j < h; j++) rest += to_float(x[j]) * to_float(x[j]);
    float scale = 1.0f / std::sqrt((sums[0] + rest) / float(h) + eps);
    for (size_t j = 0; j < i; j += CHUNK)
        narrow(half<0>(x + j) * splat(scale) * half<0>(weight + j), half<1>(x + j) * splat(scale) * half<1>(weight + j),
               out + j);
    for (size_t j = i; j < h; j++) round_to(to_float(x[j]) * scale * to_float(weight[j]), out[j]);
}

template <class E>
void norm(const E* x, size_t x_stride, const E* weight, E* out, size_t rows, size_t h, float eps) {
    for (size_t r = 0; r < rows; r++) norm_row(x + r * x_stride, weight, out + r * h, h, eps);
}

template <class E>
void add_norm(const E* x, const E* residual, const E* weight, E* out, E* sum, size_t rows, size_t h, float eps) {
    for (size_t r = 0; r < rows; r++) {
        const E *a = x + r * h, *b = residual + r * h;
        E* s = sum + r * h;
        size_t i = 0;
        for (; i + CHUNK <= h; i += CHUNK)
            narrow(half<0>(a + i) + half<0>(b + i), half<1>(a + i) + half<1>(b + i), s + i);
        for (; i < h; i++) round_to(to_float(a[i]) + to_float(b[i]), s[i]);
        norm_row(s, weight, out + r * h, h, eps);
    }
}

INLINE vf silu(vf x) { return x / (splat(1.0f) + exp(-x)); }

// torch rounds silu(gate) to x's dtype before the product; so does this.
INLINE vf again(vf x, float) { return x; }
INLINE vf again(vf x, bf16) { return (vf)(rounded_words((vu)x) & 0xffff0000u); }

// Gate and up lie in stretches of `side` channels: gate's, then up's. The whole row, or 8 of them.
template <class E>
void gated(const E* x, size_t x_stride, E* out, size_t rows, size_t inner, size_t side, int threads) {
    std::atomic<size_t> next{0};
    if (rows * inner < 65536) threads = 1;
    on_threads(threads, [&] {
        for (size_t r; (r = next.fetch_add(1, std::memory_order_relaxed)) < rows;) {
            const E* row = x + r * x_stride;
            E* o = out + r * inner;
            for (size_t i = 0; i < inner; i += CHUNK) {
                E part[3][CHUNK] = {};
                size_t left = std::min<size_t>(CHUNK, inner - i);
                const E *g = row + i, *u = g + side;
                E* to = o + i;
                if (side != inner || left < CHUNK) {
                    size_t step = side != inner ? side : left;
                    for (size_t j = 0; j < left; j += step) {
                        const E* from = side != inner ? row + 2 * (i + j) : g;
                        std::memcpy(part[0] + j, from, step * sizeof(E));
                        std::memcpy(part[1] + j, from + side, step * sizeof(E));
                    }
                    g = part[0], u = part[1], to = part[2];
                }
                narrow(again(silu(half<0>(g)), E{}) * half<0>(u), again(silu(half<1>(g)), E{}) * half<1>(u), to);
                if (to != o + i) std::memcpy(o + i, to, left * sizeof(E));
            }
        }
    });
}

template <class E>
void rotate(const E* x, const float* cos_sin, E* out, size_t dim) {
    size_t mid = dim / 2;
    const float *cos = cos_sin, *sin = cos_sin + mid;
    for (size_t i = 0; i < mid; i++) {
        float a = to_float(x[i]), b = to_float(x[mid + i]);
        round_to(a * cos[i] - b * sin[i], out[i]);
        round_to(b * cos[i] + a * sin[i], out[mid + i]);
    }
}

template <class E>
struct Append {
    const E *q, *k, *v;
    size_t q_stride, k_stride, v_stride, tokens, heads, kv_heads, dim;
    E *q_out, *k_pages, *v_pages;
    const int64_t *slots, *positions;
    size_t num_slots, max_positions;
    const float* cos_sin;
    const E *q_norm, *k_norm;
    float eps;

    int run() const {
        for (size_t t = 0; t < tokens; t++)
            if (size_t(slots[t]) >= num_slots || size_t(positions[t]) >= max_positions) return 1;
        E* normed = static_cast<E*>(std::malloc(dim * sizeof(E)));
        for (size_t t = 0; t < tokens; t++) {
            const float* angles = cos_sin + size_t(positions[t]) * dim;
            size_t slot = size_t(slots[t]) * kv_heads * dim;
            for (size_t h = 0; h < heads + kv_heads; h++) {
                bool query = h < heads;
                const E* from = query ? q + t * q_stride + h * dim : k + t * k_stride + (h - heads) * dim;
                E* to = query ? q_out + (t * heads + h) * dim : k_pages + slot + (h - heads) * dim;
                if (q_norm) {
                    norm_row(from, query ? q_norm : k_norm, normed, dim, eps);
                    from = normed;
                }
                rotate(from, angles, to, dim);
            }
            std::memcpy(v_pages + slot, v + t * v_stride, kv_heads * dim * sizeof(E));
        }
        std::free(normed);
        return 0;
    }
};

}  // namespace

EXPORT void dspark_rms_norm(int half_width, const void* x, size_t x_stride, const void* weight, void* out, size_t rows,
                            size_t h, float eps) {
    half_width ? norm((const bf16*)x, x_stride, (const bf16*)weight, (bf16*)out, rows, h, eps)
               : norm((const float*)x, x_stride, (const float*)weight, (float*)out, rows, h, eps);
}

EXPORT void dspark_add_rms_norm(int half_width, const void* x, const void* residual, const void* weight, void* out,
                                void* sum, size_t rows, size_t h, float eps) {
    half_width ? add_norm((const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)out, (bf16*)sum, rows, h,
                          eps)
               : add_norm((const float*)x, (const float*)residual, (const float*)weight, (float*)out, (float*)sum, rows,
                          h, eps);
}

EXPORT void dspark_silu_and_mul(int half_width, const void* x, size_t x_stride, void* out, size_t rows, size_t inner,
                                size_t side, int threads) {
    half_width ? gated((const bf16*)x, x_stride, (bf16*)out, rows, inner, side, threads)
               : gated((const float*)x, x_stride, (float*)out, rows, inner, side, threads);
}

EXPORT int dspark_append_kv(int half_width, const void* q, size_t q_stride, const void* k, size_t k_stride,
                            const void* v, size_t v_stride, void* q_out, void* k_pages, void* v_pages,
                            const int64_t* slots, const int64_t* positions, const float* cos_sin, const void* q_norm,
                            const void* k_norm, size_t tokens, size_t heads, size_t kv_heads, size_t dim,
                            size_t num_slots, size_t max_positions, float eps) {
    auto go = [&](auto e) {
        using E = decltype(e);
        return Append<E>{(const E*)q, (const E*)k, (const E*)v, q_stride, k_stride, v_stride, tokens, heads, kv_heads,
                         dim, (E*)q_out, (E*)k_pages, (E*)v_pages, slots, positions, num_slots, max_positions, cos_sin,
                         (const E*)q_norm, (const E*)k_norm, eps}
            .run();
    };
    return half_width ? go(bf16{}) : go(float{});
}
