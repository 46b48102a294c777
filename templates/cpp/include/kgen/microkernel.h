// Matmuls of packed blocks: what one multiplication takes in, and the loops that keep a block of results in registers.
//
// A *word* is what one lane of a multiply-add instruction takes: a number, or two neighbours along k in 16 bits each. Packed
// operands are walked through in order: rows stand in panels of kRows, with a register's words along k of each row side by side
// (L words a register, row r, word k at a[k / L * rows * L + r * L + k % L]), columns in panels of kPanel, with the words of one
// k side by side (b[k * kPanel + column]).
#pragma once

#include "ops.h"

// A CPU with the instructions: the build passes their flags. AMX needs the kernel's permission besides, asked for at run time.
#if KGEN_AVX512 && defined(__AVX512BF16__)
#define KGEN_BF16_DOT 1
#else
#define KGEN_BF16_DOT 0
#endif
#if KGEN_BF16_DOT && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define KGEN_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define KGEN_AMX 0
#endif

namespace kgen {

// Words of a row in one packed block: a panel of columns stays in L1, the rows in L2. Tiles read rows so fast that only half as
// much of a panel stays there beside them.
template <class U>
inline constexpr int64_t kDepth = U::depth_step > 1 ? 128 : 256;

// ---- what one multiplication does -----------------------------------------------------------------------------------

// One number a word. The multiplications of floats are fused into the sum where the machine can.
template <class T>
struct Numbers {
  using Element = T;
  using Word = T;
  using Acc = T;
  static constexpr int elements = 1;
  static constexpr int64_t row_step = KGEN_AVX512 ? 4 : 2, depth_step = 1;

  template <class R>
  KGEN_FN static R step(R sum, R a, R b) {
    if constexpr (KGEN_X86 && std::is_floating_point_v<T>) {
      return fma_register(a, b, sum);
    } else if constexpr (std::is_floating_point_v<T>) {
      return sum + a * b;
    } else {  // wraps
      using U = Register<std::make_unsigned_t<T>, sizeof(R) / sizeof(T)>;
      return (R)((U)sum + (U)a * (U)b);
    }
  }
  template <class R>
  KGEN_FN static R add(R sum, R a) {
    if constexpr (std::is_floating_point_v<T>) {
      return sum + a;
    } else {
      using U = Register<std::make_unsigned_t<T>, sizeof(R) / sizeof(T)>;
      return (R)((U)sum + (U)a);
    }
  }
};

// Two 16-bit integers a word: exact sums of products of 8-bit integers.
struct IntegerPairs {
  using Element = int16_t;
  using Word = int32_t;
  using Acc = int32_t;
  static constexpr int elements = 2;
  static constexpr int64_t row_step = KGEN_AVX512 ? 4 : 2, depth_step = 1;

  template <class R>
  KGEN_FN static R step(R sum, R a, R b) {
#if KGEN_AVX512 && defined(__AVX512VNNI__)
    return (R)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif KGEN_AVX512
    return (R)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)a, (__m512i)b));
#elif KGEN_AVX2
    return (R)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)a, (__m256i)b));
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
  }
  template <class R>
  KGEN_FN static R add(R sum, R a) {
    return sum + ((a << 16) >> 16) + (a >> 16);
  }
};

#if KGEN_BF16_DOT
// Two bfloat16 a word, summed in float. The instructions flush subnormal numbers to zero.
struct Bfloat16Pairs {
  using Element = uint16_t;
  using Word = int32_t;
  using Acc = float;
  static constexpr int elements = 2;
  static constexpr int64_t row_step = KGEN_AMX ? 16 : 4, depth_step = KGEN_AMX ? 16 : 1;

  KGEN_FN static Register<float, 16> step(Register<float, 16> sum, Register<int32_t, 16> a, Register<int32_t, 16> b) {
    return (Register<float, 16>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
  }
  KGEN_FN static Register<float, 16> add(Register<float, 16> sum, Register<int32_t, 16> a) {
    return sum + (Register<float, 16>)(a << 16) + (Register<float, 16>)(a & ~0xffff);
  }
};
#endif

template <class A, class B>
struct UnitOf {
  static constexpr bool bytes = sizeof(A) == 1 && sizeof(B) == 1 && std::is_integral_v<A> && std::is_integral_v<B>;
  using plain = std::common_type_t<compute_t<A>, compute_t<B>, int32_t>;
  using type = std::conditional_t<bytes, IntegerPairs, Numbers<plain>>;
};
#if KGEN_BF16_DOT
template <>
struct UnitOf<bfloat16, bfloat16> {
  using type = Bfloat16Pairs;
};
#endif
// How elements of types A and B are multiplied: doubles, floats and integers by themselves, 8-bit integers exactly in int32_t,
// bfloat16 in pairs where the CPU can; else narrow floats are widened when they are packed.
template <class A, class B>
using unit_t = typename UnitOf<A, B>::type;

template <class U>
inline constexpr int word_lanes = larger(4, kRegisterBytes / int(sizeof(typename U::Word)));
template <class U>
inline constexpr int64_t kPanel = 2 * word_lanes<U>;

// The words that `k` elements take in a packed block, zeros for a whole instruction included.
template <class U>
KGEN_FN constexpr int64_t words_of(int64_t k) {
  constexpr int64_t step = U::elements * U::depth_step;
  return (k + step - 1) / step * U::depth_step;
}

// Rows of a panel: with two registers of columns they leave a few registers for the operands, or they are those of a tile.
template <class U>
inline constexpr int64_t kRows = U::depth_step > 1 ? 16 : (KGEN_X86 ? 3 : 2) * U::row_step;
// Of the panel where `left` rows are left, a multiple of the row step.
template <class U>
KGEN_FN constexpr int64_t panel_rows(int64_t left) {
  return smaller(left, kRows<U>);
}

// ---- results in registers -------------------------------------------------------------------------------------------

// One register's worth of memory: copied alone, for an array of registers that is copied as a whole lives in memory.
template <class R, class T>
KGEN_FN R register_at(const T* from) {
  R out;
  __builtin_memcpy(&out, from, sizeof(R));
  return out;
}

// f of all lanes of a register, for four registers, each in a fixed tree.
template <class F, class S, int... I>
KGEN_FN auto fold_four_by(F f, S a, S b, S c, S d, Lanes<I...>) {
  constexpr int L = sizeof...(I), H = L / 2, Q = L / 4;
  const S ab = f(__builtin_shufflevector(a, b, (I < H ? I : I + H)...), __builtin_shufflevector(a, b, (I < H ? I + H : I + L)...));
  const S cd = f(__builtin_shufflevector(c, d, (I < H ? I : I + H)...), __builtin_shufflevector(c, d, (I < H ? I + H : I + L)...));
  S all = f(__builtin_shufflevector(ab, cd, (I / H * L + I / Q % 2 * H + I % Q)...),
            __builtin_shufflevector(ab, cd, (I / H * L + I / Q % 2 * H + I % Q + Q)...));
  if constexpr (Q > 2) all = f(all, __builtin_shufflevector(all, all, (I ^ 2)...));
  if constexpr (Q > 1) all = f(all, __builtin_shufflevector(all, all, (I ^ 1)...));
  return __builtin_shufflevector(all, all, 0, Q, 2 * Q, 3 * Q);
}
template <class S, class N>
KGEN_FN auto fold_four(S a, S b, S c, S d, N lanes) {
  return fold_four_by([](S x, S y) KGEN_INLINE { return x + y; }, a, b, c, d, lanes);
}

// c[r * ldc + j] (+)= the sum over `words` of a row and a panel's columns, for Rows rows and the first Registers registers of the
// panel. Rows, results and the panel are asked for in advance: one that was packed before the call comes from memory.
template <class U, int Rows, int Registers>
KGEN_FN void multiply_registers(const typename U::Word* a, const typename U::Word* b, int64_t words, typename U::Acc* c,
                                int64_t ldc, bool first) {
  constexpr int L = word_lanes<U>, Sums = Rows * Registers;
  constexpr int64_t tile_prefetch = 1024 / sizeof(*a), panel_prefetch = 8192 / sizeof(*b);
  using R = Register<typename U::Word, L>;
  using S = Register<typename U::Acc, L>;
  S sums[Sums] = {};
  const auto add = [&](int64_t k) KGEN_INLINE {
    R columns[Registers];
    KGEN_UNROLL for (int i = 0; i < Registers; ++i) {
      columns[i] = register_at<R>(b + i * L);
      __builtin_prefetch(b + panel_prefetch + i * L);
    }
    KGEN_UNROLL for (int r = 0; r < Rows; ++r) {
      const R row = splat_register<R>(a[r * L + k]);
      KGEN_UNROLL for (int i = 0; i < Registers; ++i) sums[r * Registers + i] = U::step(sums[r * Registers + i], row, columns[i]);
    }
    b += kPanel<U>;
  };
  const auto place = [&](int i) KGEN_INLINE { return c + i / Registers * ldc + i % Registers * L; };
  KGEN_UNROLL for (int i = 0; i < Sums; ++i) __builtin_prefetch(place(i));
  int64_t k = 0;
  for (; k + L <= words; k += L, a += Rows * L) {
    KGEN_UNROLL for (int r = 0; r < Rows; ++r) __builtin_prefetch(a + r * L + tile_prefetch);
    for (int64_t i = 0; i < L; ++i) add(i);
  }
  for (int64_t i = 0; i < words - k; ++i) add(i);
  KGEN_UNROLL for (int i = 0; i < Sums; ++i) {
    auto* const to = place(i);
    if (!first) sums[i] += register_at<S>(to);
    __builtin_memcpy(to, &sums[i], sizeof(S));
  }
}

template <class U, int Registers>
KGEN_FN void multiply_rows(const typename U::Word* a, const typename U::Word* b, int64_t words, typename U::Acc* c, int64_t ldc,
                           int64_t rows, bool first) {
  constexpr int step = U::row_step;
  for (int64_t r = 0; r < rows;) {
    const int64_t count = panel_rows<U>(rows - r);
    const auto* from = a + r * kDepth<U>;
    auto* to = c + r * ldc;
    if (count == 3 * step) multiply_registers<U, 3 * step, Registers>(from, b, words, to, ldc, first);
    else if (count == 2 * step) multiply_registers<U, 2 * step, Registers>(from, b, words, to, ldc, first);
    else multiply_registers<U, step, Registers>(from, b, words, to, ldc, first);
    r += count;
  }
}

// One block of `rows` (a multiple of the row step) by one panel, of which `columns` are wanted: those of a second register only
// where they reach it.
template <class U>
[[gnu::noinline]] void multiply_panel(const typename U::Word* a, const typename U::Word* b, int64_t words, typename U::Acc* c,
                                      int64_t ldc, int64_t rows, bool first, int64_t columns = kPanel<U>) {
  if (columns > word_lanes<U>) multiply_rows<U, 2>(a, b, words, c, ldc, rows, first);
  else multiply_rows<U, 1>(a, b, words, c, ldc, rows, first);
}

// ---- results in AMX tiles -------------------------------------------------------------------------------------------

#if KGEN_AMX
// Whether Linux lets this process use the tiles' registers. The answer is kept without a static initialiser's guard, which would
// need libstdc++; threads that ask at once get the same one.
inline bool amx_granted() {
  constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static int known = -1;
  int granted = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (granted < 0) {
    granted = syscall(SYS_arch_prctl, request, tile_data) == 0;
    __atomic_store_n(&known, granted, __ATOMIC_RELAXED);
  }
  return granted;
}

// Eight tiles of 16 rows of 64 bytes, for as long as it lives; nothing between may use tiles of another shape.
class AmxTiles {
 public:
  static bool granted() { return amx_granted(); }
  AmxTiles() {
    if (!amx_granted()) return;
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
  }
  ~AmxTiles() {
    if (amx_granted()) _tile_release();
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// 16 or 32 rows by one panel.
template <int Tiles>
KGEN_FN void multiply_tiles(const int32_t* a, const int32_t* b, int64_t words, float* c, int64_t ldc, bool first) {
  using U = Bfloat16Pairs;
  constexpr int64_t panel = kPanel<U>;
  const int64_t bytes = ldc * 4;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Tiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, c, bytes);
    _tile_loadd(1, c + 16, bytes);
    if constexpr (Tiles == 2) {
      _tile_loadd(2, c + 16 * ldc, bytes);
      _tile_loadd(3, c + 16 * ldc + 16, bytes);
    }
  }
  for (int64_t k = 0; k < words; k += 16) {
    _tile_loadd(4, a + k * 16, 64);
    _tile_loadd(6, b + k * panel, panel * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + k * panel + 16, panel * 4);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (Tiles == 2) {
      _tile_loadd(5, a + 16 * kDepth<U> + k * 16, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, bytes);
  _tile_stored(1, c + 16, bytes);
  if constexpr (Tiles == 2) {
    _tile_stored(2, c + 16 * ldc, bytes);
    _tile_stored(3, c + 16 * ldc + 16, bytes);
  }
}

// What tiles would compute, where Linux does not let the process use them.
inline void multiply_untiled(const int32_t* a, const int32_t* b, int64_t words, float* c, int64_t ldc, bool first) {
  int32_t rows[4 * kDepth<Bfloat16Pairs>];
  for (int64_t r = 0; r < 16; r += 4) {
    for (int64_t k = 0; k < words; k += 16) __builtin_memcpy(rows + k * 4, a + k * 16 + r * 16, 4 * 16 * sizeof(*a));
    multiply_registers<Bfloat16Pairs, 4, 2>(rows, b, words, c + r * ldc, ldc, first);
  }
}

// All columns of a panel, however few are wanted.
template <>
[[gnu::noinline]] inline void multiply_panel<Bfloat16Pairs>(const int32_t* a, const int32_t* b, int64_t words, float* c,
                                                            int64_t ldc, int64_t rows, bool first, int64_t) {
  constexpr int64_t depth = kDepth<Bfloat16Pairs>;
  const bool granted = amx_granted();
  for (int64_t r = 0; r < rows;) {
    const int32_t* from = a + r * depth;
    float* const to = c + r * ldc;
    if (granted && r + 32 <= rows) {
      multiply_tiles<2>(from, b, words, to, ldc, first);
      r += 32;
    } else {
      granted ? multiply_tiles<1>(from, b, words, to, ldc, first) : multiply_untiled(from, b, words, to, ldc, first);
      r += 16;
    }
  }
}
#endif

struct NoTiles {
  static constexpr bool granted() { return false; }
};
// What must live around multiply_panel in the thread that calls it.
template <class U>
#if KGEN_AMX
using tiles_t = std::conditional_t<std::is_same_v<U, Bfloat16Pairs>, AmxTiles, NoTiles>;
#else
using tiles_t = NoTiles;
#endif

}  // namespace kgen
