// Inclusive scans along the lanes: a prefix scan of each vector in log2(L) steps (Hillis and Steele, "Data parallel algorithms",
// 1986), then what all vectors before it add up to. From one vector to the next only that carry is handed on, by one operation.
#pragma once

#include "loops.h"

namespace kgen {

// ---- lanes among each other -----------------------------------------------------------------------------------------

// Lane i is lane i - N of `v`, and `fill` where there is none.
template <int N, class T, int L>
KGEN_FN Vec<T, L> shift_lanes(Vec<T, L> v, T fill) {
  using V = Vec<T, L>;
  constexpr int W = V::W, whole = N / W, part = N % W;
  const auto edge = splat_register<typename V::reg>(fill);
  V out;
  [&]<int... I>(Lanes<I...>) KGEN_INLINE {
    KGEN_UNROLL for (int i = 0; i < V::K; ++i) {
      const auto high = i >= whole ? v.r[i - whole] : edge;
      const auto low = i > whole ? v.r[i - whole - 1] : edge;
      out.r[i] = part == 0 ? high : __builtin_shufflevector(low, high, (W - part + I)...);
    }
  }(lane_numbers<W>{});
  return out;
}
template <class T, int L>
KGEN_FN Vec<T, L> splat_last(Vec<T, L> v) {
  using V = Vec<T, L>;
  const auto last = v.r[V::K - 1];
  V out;
  [&]<int... I>(Lanes<I...>) KGEN_INLINE {
    KGEN_UNROLL for (int i = 0; i < V::K; ++i) out.r[i] = __builtin_shufflevector(last, last, ((L - 1) % V::W + 0 * I)...);
  }(lane_numbers<V::W>{});
  return out;
}

template <int N, class T, int L, bool IsMax>
KGEN_FN ArgExtreme<T, L, IsMax> shift_lanes(ArgExtreme<T, L, IsMax> x, ArgExtreme<T, 1, IsMax> fill) {
  return {shift_lanes<N>(x.value, fill.value), shift_lanes<N>(x.index, fill.index)};
}
template <class T, int L, bool IsMax>
KGEN_FN ArgExtreme<T, L, IsMax> splat_last(ArgExtreme<T, L, IsMax> x) {
  return {splat_last(x.value), splat_last(x.index)};
}

// Each lane combined with all lanes before it.
template <class Op, int L, int N = 1, class X, class F>
KGEN_FN X prefixes(X x, F fill) {
  if constexpr (N >= L) {
    return x;
  } else {
    return prefixes<Op, L, 2 * N>(Op::apply(shift_lanes<N>(x, fill), x), fill);
  }
}

// ---- operations -----------------------------------------------------------------------------------------------------

struct LogAddExp {
  template <class A, class B>
  KGEN_FN static auto apply(A a, B b) { return logaddexp_(a, b); }
};
struct LastExtreme {
  template <class X>
  KGEN_FN static X apply(X earlier, X later) {
    earlier.step_last(later.value, later.index, Full<lanes_of<decltype(later.index)>>{});
    return earlier;
  }
};

// Whether all bits of all lanes are zero; not for vectors shorter than a register.
template <class T, int L>
KGEN_FN bool all_zero(Vec<T, L> v) {
  using Bits = Register<long long, Vec<T, L>::bytes / 8>;
  Bits any = (Bits)v.r[0];
  KGEN_UNROLL for (int i = 1; i < v.K; ++i) any |= (Bits)v.r[i];
#if KGEN_AVX512
  if constexpr (sizeof(any) == 64) return _mm512_test_epi64_mask((__m512i)any, (__m512i)any) == 0;
#endif
#if KGEN_X86
  if constexpr (sizeof(any) == 32) return _mm256_testz_si256((__m256i)any, (__m256i)any);
#endif
  if constexpr (sizeof(any) == 16) return (any[0] | any[1]) == 0;
}

// Negative where `low` <= `size` <= `high` does not hold, for the bits of floats that are not negative.
template <class V, class I>
KGEN_FN V beyond(V size, I low, I high) {
  return bitor_(sub_(size, low), sub_(high, size));
}

// Whether combining in a tree gives what going from lane to lane gives, up to rounding. Where it may not: a sum of two neighbours
// can overflow although the sum of all before them does not; a running product of neighbours can over- or underflow, and then
// 0 * inf is NaN where a running product would have stayed 0. From a carry of 0, infinity or NaN no running product comes back.
template <class Op, class V>
KGEN_FN bool tree_is_safe(V carry, V v, V results) {
  using T = lane_t<V>;
  if constexpr (!std::is_floating_point_v<T>) {
    return true;
  } else if constexpr (std::is_same_v<Op, Add>) {
    return all_zero(sub_(results, results));  // infinities and NaN give NaN
  } else if constexpr (std::is_same_v<Op, Mul>) {
    constexpr int exponent = (std::numeric_limits<T>::max_exponent - 2) / lanes_of<V>;
    constexpr T most = T(uint64_t(1) << smaller(exponent, 63));
    using I = signed_of_size<sizeof(T)>;
    const auto wild = beyond(bitcast_<I>(abs_(v)), bits_as<I>(T(1) / most), bits_as<I>(most));
    const auto extreme = beyond(
        bitcast_<I>(abs_(results)), bits_as<I>(std::numeric_limits<T>::min()), bits_as<I>(std::numeric_limits<T>::max()));
    constexpr I sign = std::numeric_limits<I>::min();
    if (__builtin_expect(!all_zero(bitand_(wild, sign)), 0)) return false;
    return all_zero(bitand_(extreme, sign)) || carry[0] == T(0) || carry[0] - carry[0] != T(0);
  } else {
    return true;
  }
}

// ---- scans ----------------------------------------------------------------------------------------------------------

// A scan on its way along the vector loop: `step` gives the results of the next lanes. `carry` is the result so far in each lane.
template <class Op, class T, int L>
struct Running {
  using V = Vec<T, L>;

  T identity;
  V carry = splat<L>(identity);

  template <class X, class W>
  KGEN_FN V step(X x, W w) {
    V v = coerce<V>(x);
    if constexpr (!W::full) v = where_(w.mask(), v, identity);
    if constexpr (std::is_same_v<Op, LogAddExp>) {
      // Usually no element is much larger than what came before: then one exponential and one logarithm serve all lanes.
      const V above = sub_(v, carry);
      if (fold_all(le_(above, T(8)))) {
        const V results = add_(carry, log1p_(prefixes<Add, L>(exp_(above), T(0))));
        carry = splat_last(results);
        return results;
      }
    }
    const V inside = prefixes<Op, L>(v, identity);
    V results = Op::apply(carry, inside);
    if (__builtin_expect(tree_is_safe<Op>(carry, v, results), 1)) {
      carry = Op::apply(carry, splat_last(inside));
    } else {
      auto lanes = spill(v);
      carry = splat<L>(in_order(carry[0], lanes.lane));
      // register by register: as one object the results would live in memory on the usual path too
      KGEN_UNROLL for (int i = 0; i < V::K; ++i) {
        typename V::reg r;
        __builtin_memcpy(&r, lanes.lane + i * V::W, sizeof(r));
        results.r[i] = r;
      }
    }
    return results;
  }
  // Goes on after another scan's elements.
  KGEN_FN void append(const Running& later) { carry = Op::apply(carry, later.carry); }

 private:
  // static and through memory: were `this` to escape, the carry could not stay in registers
  [[gnu::noinline, gnu::cold]] static T in_order(T total, T* lanes) {
    for (int i = 0; i < L; ++i) lanes[i] = total = Op::apply(total, lanes[i]);
    return total;
  }
};

// Running extremes with their last positions so far.
template <class T, int L, bool IsMax>
struct RunningExtreme {
  using State = ArgExtreme<T, L, IsMax>;

  State carry;

  template <class X, class P, class W>
  KGEN_FN State step(X x, P position, W w) {
    State s{coerce<typename State::V>(cast_<typename State::C>(x)), coerce<typename State::I>(position)};
    const State inside = prefixes<LastExtreme, L>(s, ArgExtreme<T, 1, IsMax>{});
    const State results = LastExtreme::apply(carry, inside);
    if constexpr (W::full) {
      carry = splat_last(results);
    } else {  // lanes beyond the tail count for nothing that is kept: they follow the last real one
      carry = {splat<L>(results.value[int(w.n) - 1]), splat<L>(results.index[int(w.n) - 1])};
    }
    return results;
  }
  KGEN_FN void append(const RunningExtreme& later) { carry = LastExtreme::apply(carry, later.carry); }
};

// From the scans of shares of one row to what stands before each share.
template <class R>
inline void chain(ThreadPartials<R>& parts, int count, R so_far) {
  for (int k = 0; k < count; ++k) {
    const R share = parts.data[k];
    parts.data[k] = so_far;
    so_far.append(share);
  }
}

}  // namespace kgen
