// y = x W^T for few tokens and a weight that is read once, as stored.
#include "simd.cpp"

namespace {

constexpr size_t ROWS = 8;      // weight rows per block
constexpr size_t DEPTH = 768;   // elements of K per pass: eight rows and four tokens of them stay in the L1 cache
constexpr size_t TOKENS = 64;   // tokens per pass over the weight

struct Problem {
    const void* x;
    size_t x_stride;
    const void* w;
    size_t w_stride;
    size_t tokens, n, k;
};

template <class E>
struct Store {  // out[t, n] = round(sum + bias)
    E* out;
    size_t n;
    const E* bias;
    INLINE void operator()(size_t t, size_t row, const float* sums, size_t count) {
        float biased[ROWS];
        E result[ROWS];
        if (bias) {
            for (size_t i = 0; i < count; i++) biased[i] = sums[i] + to_float(bias[row + i]);
            sums = biased;
        }
        round8(sums, result);
        std::memcpy(out + t * n + row, result, count * sizeof(E));
    }
};

template <class E>
struct Logits {
    float* out;
    size_t n;
    INLINE void operator()(size_t t, size_t row, const float* sums, size_t count) {
        E result[ROWS];
        round8(sums, result);
        for (size_t i = 0; i < count; i++) out[t * n + row + i] = to_float(result[i]);
    }
};

template <class E>
struct Greedy {  // the first maximum of each token; a NaN beats every number
    float* best;
    int64_t* ids;
    INLINE void operator()(size_t t, size_t row, const float* sums, size_t count) {
        E result[ROWS];
        round8(sums, result);
        for (size_t i = 0; i < count; i++) {
            float v = to_float(result[i]);
            if (!(v <= best[t]) && best[t] == best[t]) best[t] = v, ids[t] = int64_t(row + i);
        }
    }
};

// T tokens meet the eight rows of a block, R rows at a time.
template <int R, int T, bool FETCH, class E>
INLINE void group(const E* w, size_t w_stride, const E* tail, const float* x, size_t x_stride, size_t chunks, vf* saved,
                  bool first, bool last, float* sums) {
    for (size_t r = 0; r < ROWS; r += R) {
        vf acc[T][R];
        if (first)
            std::memset(acc, 0, sizeof acc);
        else
            std::memcpy(acc, saved + r * T, sizeof acc);
        const E* from = w + r * w_stride;
        tile<FETCH ? int(ROWS) : 0>(from, w_stride, x, x_stride, chunks, acc);
        if (!last) {
            std::memcpy(saved + r * T, acc, sizeof acc);
            continue;
        }
        if (tail) tile<0>(tail + r * CHUNK, CHUNK, x + chunks * CHUNK, x_stride, 1, acc);
        const vf* flat = &acc[0][0];
        float out[R * T];
        for (int i = 0; i < R * T; i += 4) sum4(flat[i], flat[i + 1], flat[i + 2], flat[i + 3], out + i);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < R; i++) sums[t * ROWS + r + i] = out[t * R + i];
    }
}

// sums[t, r] of the eight weight rows at w. Weights go from memory straight into the multipliers; while the first
// tokens meet a block, the next block is fetched.
template <class E>
void block(const E* w, size_t w_stride, const float* x, size_t x_stride, size_t tokens, size_t k, vf* saved,
           float* sums) {
    size_t whole = k / CHUNK, depth = whole;
    if (tokens > 4) depth = (whole + (k - 1) / DEPTH) / ((k - 1) / DEPTH + 1);
    E tail[ROWS * CHUNK];
    if (k % CHUNK) {
        std::memset(tail, 0, sizeof tail);
        for (size_t r = 0; r < ROWS; r++)
            std::memcpy(tail + r * CHUNK, w + r * w_stride + whole * CHUNK, k % CHUNK * sizeof(E));
    }
    for (size_t from = 0, chunks; from == 0 || from < whole; from += chunks) {
        chunks = std::min(depth, whole - from);
        bool first = from == 0, last = from + chunks >= whole;
        const E *wk = w + from * CHUNK, *end = last && k % CHUNK ? tail : nullptr;
        const float* xk = x + from * CHUNK;
        auto go = [&](auto fetch, size_t t) {
            constexpr bool F = decltype(fetch)::value;
            const float* xt = xk + t * x_stride;
            vf* slot = saved + t * ROWS;
            float* out = sums + t * ROWS;
            switch (tokens - t) {
                // Alone, one token waits for memory, which likes four rows at a time better than eight.
                case 1: group<F ? 4 : 8, 1, F>(wk, w_stride, end, xt, x_stride, chunks, slot, first, last, out); return;
                case 2: group<4, 2, F>(wk, w_stride, end, xt, x_stride, chunks, slot, first, last, out); return;
                case 3: group<4, 3, F>(wk, w_stride, end, xt, x_stride, chunks, slot, first, last, out); return;
                default: group<2, 4, F>(wk, w_stride, end, xt, x_stride, chunks, slot, first, last, out);
            }
        };
        go(std::true_type{}, 0);
        for (size_t t = 4; t < tokens; t += 4) go(std::false_type{}, t);
        if (!chunks) break;
    }
}

thread_local Scratch x_scratch, row_scratch, sum_scratch;

// make() gives every thread its own sink; done(sink) takes it back.
template <class E, class Make, class Done>
void product(const Problem& p, int threads, Make make, Done done) {
    const E *w = static_cast<const E*>(p.w), *x = static_cast<const E*>(p.x);
    size_t blocks = (p.n + ROWS - 1) / ROWS, spans = (p.tokens + TOKENS - 1) / TOKENS, kp = padded(p.k);
    if (double(p.n) * p.k * p.tokens < 100000) threads = 1;  // waking the others takes longer
    // Small pieces even out cores that others use too; each is still a few pages of weights in a row.
    size_t piece = std::max<size_t>(1, std::min<size_t>(64, blocks / (size_t(threads) * 6)));
    size_t pieces = (blocks + piece - 1) / piece;
    std::atomic<size_t> next{0};
    on_threads(threads, [&] {
        auto sink = make();
        float* image = x_scratch.get<float>(std::min(TOKENS, p.tokens) * kp);
        vf* saved = sum_scratch.get<vf>(TOKENS * ROWS);
        alignas(64) float sums[TOKENS * ROWS];
        size_t have = spans;
        for (size_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < pieces * spans;) {
            size_t span = task / pieces, t0 = span * TOKENS, tokens = std::min(TOKENS, p.tokens - t0);
            if (span != have) {
                for (size_t t = 0; t < tokens; t++) widen(x + (t0 + t) * p.x_stride, p.k, image + t * kp);
                have = span;
            }
            size_t end = std::min(blocks, (task % pieces + 1) * piece);
            for (size_t b = task % pieces * piece; b < end; b++) {
                size_t count = std::min(ROWS, p.n - b * ROWS), stride = p.w_stride;
                const E* from = w + b * ROWS * stride;
                if (count < ROWS) {  // the last rows of a weight: repeat one to fill the block
                    E* copy = row_scratch.get<E>(ROWS * p.k);
                    for (size_t i = 0; i < ROWS; i++)
                        std::memcpy(copy + i * p.k, from + (i < count ? i : 0) * stride, p.k * sizeof(E));
                    from = copy, stride = p.k;
                }
                block(from, stride, image, kp, tokens, p.k, saved, sums);
                for (size_t t = 0; t < tokens; t++) {
                    if (count == ROWS)
                        sink(t0 + t, b * ROWS, sums + t * ROWS, ROWS);
                    else
                        sink(t0 + t, b * ROWS, sums + t * ROWS, count);
                }
            }
        }
        done(sink);
    });
}

template <class E>
void linear(const Problem& p, const void* bias, void* out, int threads) {
    product<E>(
        p, threads, [&] { return Store<E>{static_cast<E*>(out), p.n, static_cast<const E*>(bias)}; }, [](auto&) {});
}

template <class E>
void logits(const Problem& p, float* out, int threads) {
    product<E>(p, threads, [&] { return Logits<E>{out, p.n}; }, [](auto&) {});
}

template <class E>
void greedy(const Problem& p, int64_t* ids, float* best, int threads) {
    static thread_local Scratch scratch;
    const float none = -std::numeric_limits<float>::infinity();
    std::fill(best, best + p.tokens, none);
    std::fill(ids, ids + p.tokens, 0);
    std::atomic_flag lock = ATOMIC_FLAG_INIT;
    product<E>(
        p, threads,
        [&] {
            int64_t* own = scratch.get<int64_t>(2 * p.tokens);
            float* values = reinterpret_cast<float*>(own + p.tokens);
            std::fill(values, values + p.tokens, none);
            std::fill(own, own + p.tokens, std::numeric_limits<int64_t>::max());
            return Greedy<E>{values, own};
        },
        [&](Greedy<E>& s) {
            while (lock.test_and_set(std::memory_order_acquire)) {
            }
            for (size_t t = 0; t < p.tokens; t++) {
                if (s.ids[t] == std::numeric_limits<int64_t>::max()) continue;
                bool nan = s.best[t] != s.best[t], held = best[t] != best[t];
                bool tie = nan ? held : s.best[t] == best[t];
                bool better = tie ? s.ids[t] < ids[t] : nan || (!held && s.best[t] > best[t]);
                if (better) best[t] = s.best[t], ids[t] = s.ids[t];
            }
            lock.clear(std::memory_order_release);
        });
}

}  // namespace

EXPORT void dspark_pool(void* run, void* barrier) {
    pool_run = reinterpret_cast<decltype(pool_run)>(run);
    pool_barrier = reinterpret_cast<decltype(pool_barrier)>(barrier);
}

EXPORT void dspark_linear(int half_width, const void* x, size_t x_stride, const void* w, size_t w_stride,
                          const void* bias, void* out, size_t tokens, size_t n, size_t k, int threads) {
    Problem p{x, x_stride, w, w_stride, tokens, n, k};
    half_width ? linear<bf16>(p, bias, out, threads) : linear<float>(p, bias, out, threads);
}

EXPORT void dspark_logits(int half_width, const void* x, size_t x_stride, const void* w, size_t w_stride, float* out,
                          size_t tokens, size_t n, size_t k, int threads) {
    Problem p{x, x_stride, w, w_stride, tokens, n, k};
    half_width ? logits<bf16>(p, out, threads) : logits<float>(p, out, threads);
}

EXPORT void dspark_greedy(int half_width, const void* x, size_t x_stride, const void* w, size_t w_stride, int64_t* ids,
                          float* best, size_t tokens, size_t n, size_t k, int threads) {
    Problem p{x, x_stride, w, w_stride, tokens, n, k};
    half_width ? greedy<bf16>(p, ids, best, threads) : greedy<float>(p, ids, best, threads);
}
