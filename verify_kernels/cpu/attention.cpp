// Attention of a few new tokens over a paged cache: scores, softmax, weighted values, each in float32.
//
// Softmax takes the true maximum of a row before any exponential, and both sums run over the keys one after another, so
// a hidden key adds exactly nothing. A token's output is therefore the same whether the keys it sees lie side by side
// (plain decoding) or between hidden siblings (a tree).
#include "simd.cpp"

namespace {

constexpr size_t KEYS = 32;    // keys per block
constexpr size_t SLICE = 32;   // value dimensions per pass
constexpr size_t MAX_ROWS = 96;  // query rows that share one pass over the keys

struct Batch {  // filled by verify_kernels/cpu/attention.py: same order there
    const int32_t* offsets;   // [R + 1]
    const int32_t* context;   // [R]
    const int32_t* table;     // [R, table_stride]
    const int64_t* positions; // [N], read where window > 0
    const uint64_t* masks;    // [N] or null
    int64_t requests, tokens, table_width, table_stride;
    int64_t full;             // 1: every new token sees every new token
    int64_t window;           // 0: none
    int64_t first_query;      // new tokens of each request that are in the cache already
};

template <class E>
struct Attention {
    const Batch& b;
    const E* q;  // [N, heads, dim], row stride q_stride
    const E *k, *v;
    E* out;
    size_t q_stride, heads, kv_heads, dim, page_size, page_stride, token_stride;
    float scale, softcap;

    struct Task {  // some consecutive tokens of one request, one KV head
        size_t first, tokens, local, request, head;  // first: row in the batch; local: index among the new tokens
        size_t begin, end, context;                  // keys begin .. end of the request
        float *queries, *scores;
        size_t stride;
    };

    size_t group() const { return heads / kv_heads; }
    size_t rows(const Task& t) const { return t.tokens * group(); }

    Task task(size_t request, size_t local, size_t tokens, size_t head) const {
        size_t start = size_t(b.offsets[request]), count = size_t(b.offsets[request + 1]) - start;
        size_t before = size_t(b.first_query);
        Task t{start + local, tokens, before + local, request, head, 0, 0, size_t(b.context[request]), nullptr, nullptr, 0};
        t.end = t.context + before + (b.masks || b.full ? count : local + tokens);
        t.end = std::min(t.end, size_t(b.table_width) * page_size);
        if (b.window) {
            int64_t low = b.positions[t.first];
            for (size_t i = 1; i < tokens; i++) low = std::min(low, b.positions[t.first + i]);
            t.begin = size_t(std::clamp<int64_t>(low - b.window + 1, 0, int64_t(std::min(t.context, t.end))));
        }
        t.stride = (t.end - t.begin + KEYS - 1) / KEYS * KEYS;
        return t;
    }

    bool sees(const Task& t, size_t i, size_t key) const {  // token i of the task
        if (key >= t.context) {
            size_t j = key - t.context;
            if (b.masks) {
                if (!(b.masks[t.first + i] >> std::min<size_t>(j, 63) & 1)) return false;
            } else if (!b.full && j > t.local + i) {
                return false;
            }
        }
        if (b.window) {
            int64_t at = key < t.context ? int64_t(key) : b.positions[b.offsets[t.request] + key - t.context];
            if (b.positions[t.first + i] - at >= b.window) return false;
        }
        return true;
    }

    // Where `count` keys (or values) from `key` on are stored.
    void locate(const E* pages, const Task& t, size_t key, size_t count, const E** rows) const {
        const int32_t* table = b.table + t.request * b.table_stride + key / page_size;
        for (size_t offset = key % page_size, i = 0; i < count; table++, offset = 0) {
            const E* row = pages + size_t(*table) * page_stride + offset * token_stride + t.head * dim;
            for (; offset < page_size && i < count; offset++, row += token_stride) rows[i++] = row;
        }
    }

    void widen_queries(const Task& t) const {
        size_t dp = padded(dim), g = group();
        for (size_t r = 0; r < rows(t); r++)
            widen(q + (t.first + r / g) * q_stride + (t.head * g + r % g) * dim, dim, t.queries + r * dp);
    }

    template <int T>
    INLINE void score_rows(const float* keys, const float* queries, size_t dp, float* out, size_t stride) const {
        vf acc[T][4];
        for (auto& row : acc)
            for (auto& a : row) a = vf{};
        tile<0>(keys, dp, queries, dp, dp / CHUNK, acc);
        for (int i = 0; i < T; i++) sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3], out + i * stride);
    }

    // Scores of keys begin + from .. begin + to; from is a multiple of KEYS.
    void scores(const Task& t, size_t from, size_t to, float* image) const {
        size_t dp = padded(dim), n = rows(t), g = group();
        for (; from < to; from += KEYS) {
            size_t first = t.begin + from, count = std::min(KEYS, to - from), whole = (count + 3) / 4 * 4;
            const E* stored[KEYS];
            locate(k, t, first, count, stored);
            for (size_t j = 0; j < count; j++) widen(stored[j], dim, image + j * dp);
            std::memset(image + count * dp, 0, (whole - count) * dp * 4);
            for (size_t r = 0; r < n;) {
                size_t some = n - r <= 3 ? n - r : 2;
                const float* qr = t.queries + r * dp;
                float* s = t.scores + r * t.stride + from;
                for (size_t j = 0; j < whole; j += 4)
                    some == 3   ? score_rows<3>(image + j * dp, qr, dp, s + j, t.stride)
                    : some == 2 ? score_rows<2>(image + j * dp, qr, dp, s + j, t.stride)
                                : score_rows<1>(image + j * dp, qr, dp, s + j, t.stride);
                r += some;
            }
            bool masked = b.window || first + count > t.context;
            for (size_t r = 0; r < n; r++) {
                float* s = t.scores + r * t.stride + from;
                for (size_t j = 0; j < KEYS; j += VL) {
                    vf x = load<vf>(s + j) * splat(scale);
                    if (softcap) {  // c tanh(x / c) = c - 2 c / (exp(2 x / c) + 1)
                        vf e = exp(x * splat(2.0f / softcap));
                        x = splat(softcap) - splat(2.0f * softcap) / (e + splat(1.0f));
                    }
                    store(s + j, x);
                }
                for (size_t j = count; j < KEYS; j++) s[j] = -std::numeric_limits<float>::infinity();
                if (masked)
                    for (size_t j = 0; j < count; j++)
                        if (!sees(t, r / g, first + j)) s[j] = -std::numeric_limits<float>::infinity();
            }
        }
    }

    void softmax(const Task& t, size_t row) const {  // exp(score - max), not yet divided by the sum
        float* s = t.scores + row * t.stride;
        const float none = -std::numeric_limits<float>::infinity();
        vf top = splat(0.0f) + none;
        for (size_t j = 0; j < t.stride; j += VL) {
            vf x = load<vf>(s + j);
            top = pick(x > top, x, top);
        }
        float m = none;
        for (int i = 0; i < VL; i++) m = std::max(m, top[i]);
        if (m == none) m = 0.0f;  // no key is visible: all weights become zero (or NaN, where a score is)
        for (size_t j = 0; j < t.stride; j += VL) store(s + j, exp(load<vf>(s + j) - splat(m)));
    }

    template <int R, int V>
    INLINE void value_rows(const float* weights, size_t stride, const float* values, size_t count, vf* sums) const {
        vf acc[R][V + 1];
        unroll<R>(BODY(r) { unroll<V + 1>(BODY(i) { acc[r][i] = sums[r * (V + 1) + i]; }); });
        for (size_t j = 0; j < count; j++) {
            vf p[R];
            unroll<R>(BODY(r) {
                p[r] = splat(weights[r * stride + j]);
                HOLD(p[r]);
                acc[r][V] += p[r];
            });
            unroll<V>(BODY(i) {
                vf x = load<vf>(values + j * SLICE + i * VL);
                HOLD(x);
                unroll<R>(BODY(r) { MULTIPLY_ADD(acc[r][i], p[r], x); });
            });
        }
        unroll<R>(BODY(r) { unroll<V + 1>(BODY(i) { sums[r * (V + 1) + i] = acc[r][i]; }); });
    }

    // Output dimensions from .. from + SLICE of every row.
    void values(const Task& t, size_t from, float* image, vf* sums) const {
        constexpr int V = SLICE / VL;
        size_t n = rows(t), g = group(), width = std::min(SLICE, dim - from), keys = t.end - t.begin;
        for (size_t i = 0; i < n * (V + 1); i++) sums[i] = vf{};
        std::memset(image, 0, KEYS * SLICE * 4);
        for (size_t base = 0; base < keys; base += KEYS) {
            size_t count = std::min(KEYS, keys - base);
            const E* stored[KEYS];
            locate(v, t, t.begin + base, count, stored);
            for (size_t j = 0; j < count; j++) widen(stored[j] + from, width, image + j * SLICE);
            bool finite = true;
            if (b.window || t.begin + base + count > t.context) {  // zero weights must also hide NaN and infinity
                vf zero{};
                for (size_t i = 0; i < count * SLICE; i += VL) zero += load<vf>(image + i) * 0.0f;
                for (int i = 0; i < VL; i++) finite &= zero[i] == 0.0f;
            }
            if (!finite) {
                for (size_t r = 0; r < n; r++)
                    for (size_t j = 0; j < count; j++)
                        if (t.scores[r * t.stride + base + j] != 0.0f)
                            value_rows<1, V>(t.scores + r * t.stride + base + j, t.stride, image + j * SLICE, 1,
                                             sums + r * (V + 1));
                continue;
            }
            size_t r = 0;
            for (; r + 2 <= n; r += 2)
                value_rows<2, V>(t.scores + r * t.stride + base, t.stride, image, count, sums + r * (V + 1));
            if (r < n) value_rows<1, V>(t.scores + r * t.stride + base, t.stride, image, count, sums + r * (V + 1));
        }
        for (size_t r = 0; r < n; r++) {
            vf* row = sums + r * (V + 1);
            vf total = row[V];
            total = pick(total == splat(0.0f), splat(1.0f), total);
            E* o = out + ((t.first + r / g) * heads + t.head * g + r % g) * dim + from;
            for (size_t d = 0; d < width; d += CHUNK) {
                vf a = row[d / VL] / total, c = row[d / VL + 1] / total;
                if (d + CHUNK <= width) {
                    narrow(a, c, o + d);
                } else {
                    E tail[CHUNK];
                    narrow(a, c, tail);
                    std::memcpy(o + d, tail, (width - d) * sizeof(E));
                }
            }
        }
    }
};

thread_local Scratch image_scratch, score_scratch, sum_scratch;
thread_local Scratch task_scratch, offset_scratch;

struct Room {  // a thread's working memory
    float* image;
    vf* sums;
    Room(size_t dim, size_t rows)
        : image(image_scratch.get<float>(KEYS * std::max(padded(dim), SLICE))),
          sums(sum_scratch.get<vf>(rows * (SLICE / VL + 1))) {}
};

template <class E>
void attend(const Attention<E>& a, int threads) {
    using Task = typename Attention<E>::Task;
    const Batch& b = a.b;
    size_t at_once = std::max<size_t>(1, MAX_ROWS / a.group()), dp = padded(a.dim), total = 0, work = 0;
    auto each = [&](auto&& visit) {
        for (size_t r = 0; r < size_t(b.requests); r++) {
            size_t count = size_t(b.offsets[r + 1] - b.offsets[r]);
            for (size_t i = 0; i < count; i += at_once)
                for (size_t h = 0; h < a.kv_heads; h++) visit(r, i, std::min(at_once, count - i), h);
        }
    };
    each([&](auto...) { total++; });
    Task* tasks = task_scratch.get<Task>(total);
    size_t floats = 0, filled = 0;
    each([&](size_t r, size_t i, size_t n, size_t h) {
        Task t = tasks[filled++] = a.task(r, i, n, h);
        floats += a.rows(t) * (dp + t.stride);
        work += a.rows(t) * t.stride * a.dim;
    });
    if (work < 300000) threads = 1;  // waking the others takes longer
    std::atomic<size_t> next{0};
    if (threads == 1 || total >= size_t(threads) * 4) {  // a task per thread
        on_threads(threads, [&] {
            Room room(a.dim, at_once * a.group());
            for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total;) {
                Task t = tasks[total - 1 - i];  // the last tokens of a causal pass see the most keys: start with them
                t.queries = score_scratch.get<float>(a.rows(t) * (dp + t.stride));
                t.scores = t.queries + a.rows(t) * dp;
                a.widen_queries(t);
                a.scores(t, 0, t.end - t.begin, room.image);
                for (size_t r = 0; r < a.rows(t); r++) a.softmax(t, r);
                for (size_t d = 0; d < a.dim; d += SLICE) a.values(t, d, room.image, room.sums);
            }
        });
        return;
    }
    // Few tasks: all threads work on each of them, keys first, then rows, then value dimensions.
    constexpr size_t PIECE = 4 * KEYS;
    float* memory = score_scratch.get<float>(floats);
    size_t* offsets = offset_scratch.get<size_t>(3 * (total + 1));
    size_t *pieces = offsets, *lines = offsets + total + 1, *slices = lines + total + 1;
    pieces[0] = lines[0] = slices[0] = 0;
    for (size_t i = 0; i < total; i++) {
        Task& t = tasks[i];
        t.queries = memory;
        t.scores = memory + a.rows(t) * dp;
        memory = t.scores + a.rows(t) * t.stride;
        a.widen_queries(t);
        pieces[i + 1] = pieces[i] + (t.end - t.begin + PIECE - 1) / PIECE;
        lines[i + 1] = lines[i] + a.rows(t);
        slices[i + 1] = slices[i] + (a.dim + SLICE - 1) / SLICE;
    }
    std::atomic<size_t> next_line{0}, next_slice{0};
    auto drain = [&](std::atomic<size_t>& counter, const size_t* starts, auto&& visit) {
        for (size_t i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < starts[total];) {
            size_t which = std::upper_bound(starts, starts + total + 1, i) - starts - 1;
            visit(tasks[which], i - starts[which]);
        }
    };
    on_threads(threads, [&] {
        Room room(a.dim, at_once * a.group());
        drain(next, pieces, [&](Task& t, size_t i) {
            a.scores(t, i * PIECE, std::min((i + 1) * PIECE, t.end - t.begin), room.image);
        });
        if (pool_run) pool_barrier();
        drain(next_line, lines, [&](Task& t, size_t i) { a.softmax(t, i); });
        if (pool_run) pool_barrier();
        drain(next_slice, slices, [&](Task& t, size_t i) { a.values(t, i * SLICE, room.image, room.sums); });
    });
}

template <class E>
int run(const Batch& b, const void* q, const void* k, const void* v, void* out, size_t q_stride, size_t heads,
        size_t kv_heads, size_t dim, size_t pages, size_t page_size, float scale, float softcap, int threads) {
    size_t row = heads * dim * sizeof(E);
    if (b.offsets[0] < 0) return 1;
    for (int64_t r = 0; r < b.requests; r++) {
        if (b.offsets[r + 1] < b.offsets[r] || b.offsets[r + 1] > b.tokens || b.context[r] < 0) return 1;
        if (b.offsets[r + 1] == b.offsets[r]) continue;  // a request without new tokens is not read
        int64_t keys = int64_t(b.context[r]) + b.first_query + b.offsets[r + 1] - b.offsets[r];
        int64_t used = std::min<int64_t>((keys + int64_t(page_size) - 1) / int64_t(page_size), b.table_width);
        for (int64_t i = 0; i < used; i++) {
            int32_t page = b.table[r * b.table_stride + i];
            if (page < 0 || size_t(page) >= pages) return 2;
        }
    }
    // Rows that belong to no request are zero.
    std::memset(out, 0, size_t(b.offsets[0]) * row);
    std::memset(static_cast<char*>(out) + size_t(b.offsets[b.requests]) * row, 0,
                size_t(b.tokens - b.offsets[b.requests]) * row);
    size_t token = kv_heads * dim;
    attend(Attention<E>{b, static_cast<const E*>(q), static_cast<const E*>(k), static_cast<const E*>(v),
                        static_cast<E*>(out), q_stride, heads, kv_heads, dim, page_size, page_size * token, token,
                        scale, softcap},
           threads);
    return 0;
}

}  // namespace

EXPORT int dspark_attention(int half_width, const Batch* b, const void* q, const void* k, const void* v, void* out,
                            size_t q_stride, size_t heads, size_t kv_heads, size_t dim, size_t pages, size_t page_size,
                            float scale, float softcap, int threads) {
    return (half_width ? run<bf16> : run<float>)(*b, q, k, v, out, q_stride, heads, kv_heads, dim, pages, page_size,
                                                 scale, softcap, threads);
}
