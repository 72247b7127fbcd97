// Vectors, bfloat16 and threads: included by every kernel.
//
// One rule runs through all kernels: a number depends on the values it is made of and on nothing else. Every dot
// product is summed in the same order whatever else shares the call, so a token's result is bit for bit the same alone,
// in a draft tree and in a batch, on one thread and on many.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int VL = 16;
#else
constexpr int VL = 8;
#endif
constexpr int CHUNK = 2 * VL;  // elements of one step along a dot product

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));

// f(0), f(1), ... with constant arguments: arrays indexed by them live in registers, whatever becomes of loops.
template <class F, int... I>
INLINE void unrolled(std::integer_sequence<int, I...>, F f) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
INLINE void unroll(F f) {
    unrolled(std::make_integer_sequence<int, N>{}, f);
}
#define BODY(i) [&](auto i) __attribute__((always_inline))

struct bf16 {
    uint16_t bits;
};

template <class V>
INLINE V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
INLINE void store(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}
// acc += a * b with every operand in a register, in the order written: left alone, compilers load an operand again for
// each use or spill accumulators, and the load ports, not the multipliers, set the pace.
#if defined(__AVX512F__)
#define HOLD(v) asm volatile("" : "+v"(v))
#define MULTIPLY_ADD(acc, a, b) asm volatile("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b))
#elif defined(__FMA__)
#define HOLD(v) asm volatile("" : "+x"(v))
#define MULTIPLY_ADD(acc, a, b) asm volatile("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b))
#else
#define HOLD(v) (void)(v)
#define MULTIPLY_ADD(acc, a, b) acc += (a) * (b)
#endif

INLINE vf splat(float x) { return x - vf{}; }
INLINE vf pick(vi where, vf a, vf b) { return (vf)((where & (vi)a) | (~where & (vi)b)); }

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t word = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &word, 4);
    return f;
}
INLINE vu rounded_words(vu w) {  // float bits rounded to nearest even at bit 16; the low half is left dirty
    vu up = w + 0x7fffu + ((w >> 16) & 1u);
    vu nan = (vu)((w & 0x7fffffffu) > 0x7f800000u);
    return (nan & 0x7fc00000u) | (~nan & up);
}
INLINE void round_to(float x, float& out) { out = x; }
INLINE void round_to(float x, bf16& out) {
    uint32_t w;
    std::memcpy(&w, &x, 4);
    uint32_t up = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16, nan = (w & 0x7fffffffu) > 0x7f800000u;
    out.bits = uint16_t(nan ? 0x7fc0u : up);
}
// The float32 image of CHUNK elements is two vectors. For bfloat16 they are the even and the odd elements, which cost
// one shift and one mask instead of shuffles; a dot product does not care as long as both sides use the same image.
template <int HALF>
INLINE vf half(const float* p) {
    return load<vf>(p + HALF * VL);
}
template <int HALF>
INLINE vf half(const bf16* p) {
    vu words = load<vu>(p);
    return HALF ? (vf)(words & 0xffff0000u) : (vf)(words << 16);
}
// Eight floats at once.
INLINE void round8(const float* in, float* out) { std::memcpy(out, in, 32); }
INLINE void round8(const float* in, bf16* out) {
    typedef uint32_t words8 __attribute__((vector_size(32)));
    typedef uint16_t halves8 __attribute__((vector_size(16)));
    words8 w = load<words8>(in), nan = (words8)((w & 0x7fffffffu) > 0x7f800000u);
    words8 up = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    store(out, __builtin_convertvector((nan & 0x7fc0u) | (~nan & up), halves8));
}
// Back from the image to memory order.
INLINE void narrow(vf a, vf b, float* out) {
    store(out, a);
    store(out + VL, b);
}
INLINE void narrow(vf even, vf odd, bf16* out) {
    store(out, (rounded_words((vu)even) >> 16) | (rounded_words((vu)odd) & 0xffff0000u));
}

INLINE size_t padded(size_t n) { return (n + CHUNK - 1) / CHUNK * CHUNK; }

template <class E>
INLINE void widen(const E* in, size_t n, float* out) {  // n elements -> image, zero padded to a whole chunk
    size_t i = 0;
    for (; i + CHUNK <= n; i += CHUNK) {
        store(out + i, half<0>(in + i));
        store(out + i + VL, half<1>(in + i));
    }
    if (i < n) {
        E tail[CHUNK] = {};
        std::memcpy(tail, in + i, (n - i) * sizeof(E));
        store(out + i, half<0>(tail));
        store(out + i + VL, half<1>(tail));
    }
}

INLINE void sum4(vf a, vf b, vf c, vf d, float* out) {
#if defined(__AVX512F__)
    auto fold = [](vf v) {
        return _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
    };
    __m256 a8 = fold(a), b8 = fold(b), c8 = fold(c), d8 = fold(d);
#elif defined(__AVX__)
    __m256 a8 = (__m256)a, b8 = (__m256)b, c8 = (__m256)c, d8 = (__m256)d;
#endif
#if defined(__AVX__)
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a8, b8), _mm256_hadd_ps(c8, d8));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
#else
    vf all[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        float lanes[VL];
        store(lanes, all[i]);
        for (int width = VL / 2; width; width /= 2)
            for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
        out[i] = lanes[0];
    }
#endif
}

INLINE vf exp(vf x) {  // within 2 ulp; exactly 0 below -87.3, NaN stays NaN
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf low = splat(-87.3f), high = splat(88.7f);
    vi zero = x < low;
    vf y = pick(x > high, high, pick(zero, low, x));
    vf shifted = y * splat(1.44269504088896341f) + magic;
    vf n = shifted - magic;
    vf r = y - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * (r * r) + r + splat(1.0f);
    // 2^n in two factors: n = 128 alone would overflow the exponent field.
    vi i = (vi)shifted - (vi)magic, first = i >> 1, second = i - first;
    p = p * (vf)((first + 127) << 23) * (vf)((second + 127) << 23);
    p = pick(x > high, splat(std::numeric_limits<float>::infinity()), p);
    return pick(zero, splat(0.0f), pick(x == x, p, x));
}

template <int HALF, int R, int T, class W>
INLINE void step(const W* w, size_t w_stride, const float* x, size_t x_stride, vf (&acc)[T][R]) {
    vf xv[T];
    unroll<T>(BODY(t) {
        xv[t] = load<vf>(x + t * x_stride + HALF * VL);
        HOLD(xv[t]);
    });
    unroll<R>(BODY(r) {
        vf wv = half<HALF>(w + r * w_stride);
        HOLD(wv);
        unroll<T>(BODY(t) { MULTIPLY_ADD(acc[t][r], wv, xv[t]); });
    });
}

// A register tile: acc[t][r] += sum over `chunks` of image(w row r) * x row t. x is an image already; w an image
// (float) or raw elements. FETCH: how many rows ahead to prefetch, into the L2 cache (which has more fetches in
// flight than the L1 cache); 0: nothing. Eight sums keep the multipliers busy and leave registers for the
// operands; so tiles are 8 x 1, 4 x 2 and 2 x 4.
template <int FETCH, int R, int T, class W>
INLINE void tile(const W* w, size_t w_stride, const float* x, size_t x_stride, size_t chunks, vf (&acc)[T][R]) {
    vf sum[T][R];  // a copy that nobody points to can live in registers
    unroll<T>(BODY(t) { unroll<R>(BODY(r) { sum[t][r] = acc[t][r]; }); });
    constexpr int LINES = R * CHUNK * int(sizeof(W)) / 64;  // per chunk: where a line is two chunks, every other row
    const W *ahead = w + FETCH * w_stride, *other = ahead + (LINES < R ? w_stride : 0);
    for (size_t c = 0; c < chunks; c++) {
        if (FETCH) {
            for (int i = 0; i < LINES; i++) __builtin_prefetch(ahead + R / LINES * i * w_stride + c * CHUNK, 0, 2);
            std::swap(ahead, other);
        }
        step<0>(w + c * CHUNK, w_stride, x + c * CHUNK, x_stride, sum);
        step<1>(w + c * CHUNK, w_stride, x + c * CHUNK, x_stride, sum);
    }
    unroll<T>(BODY(t) { unroll<R>(BODY(r) { acc[t][r] = sum[t][r]; }); });
}

struct Scratch {  // grows, never shrinks; one per thread and use
    char* data = nullptr;
    size_t size = 0;
    template <class V>
    V* get(size_t count) {
        if (count * sizeof(V) > size) {
            std::free(data);
            size = (count * sizeof(V) + 4095) / 4096 * 4096;
            data = static_cast<char*>(std::aligned_alloc(4096, size));
            if (!data) std::abort();
        }
        return reinterpret_cast<V*>(data);
    }
    ~Scratch() { std::free(data); }
};

// The thread pool is the OpenMP pool of the process that loads this library, handed over as two function pointers: a
// second pool would fight it for the cores.
inline void (*pool_run)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
inline void (*pool_barrier)() = nullptr;

template <class F>
void on_threads(int threads, F&& body) {  // body runs once on each thread
    if (threads > 1 && pool_run)
        pool_run([](void* f) { (*static_cast<std::remove_reference_t<F>*>(f))(); }, &body, unsigned(threads), 0);
    else
        body();
}
