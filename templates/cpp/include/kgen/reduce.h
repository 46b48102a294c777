// Accumulators of reductions. With L lanes each lane accumulates its own part until `fold`; with one lane everything is scalar.
//
//   acc = splat<L>(identity); acc = step_sum(acc, v, w); total = join_sum(fold_sum(a), fold_sum(b))
//
// and the same for prod, max, min, any, all, bitxor. Lanes that `w` leaves out are unchanged by a step.
#pragma once

#include "math.h"

namespace kgen {

// Combines the lanes in a fixed tree.
template <class F, class X>
KGEN_FN lane_t<X> fold_lanes(F f, X x) {
  if constexpr (lanes_of<X> == 1) {
    return x;
  } else if constexpr (lanes_of<X> == 4) {
    return f(f(x[0], x[2]), f(x[1], x[3]));
  } else {
    return fold_lanes(f, f(half_of<0>(x), half_of<1>(x)));
  }
}

// Lanes whose numbers differ in the bit S alone, exchanged.
template <int S, class T, int L>
KGEN_FN Vec<T, L> swap_lanes(Vec<T, L> v) {
  using V = Vec<T, L>;
  V out;
  KGEN_UNROLL for (int i = 0; i < V::K; ++i) {
    if constexpr (S >= V::W) {
      out.r[i] = v.r[i ^ (S / V::W)];
    } else {
      [&]<int... I>(Lanes<I...>) KGEN_INLINE {
        out.r[i] = __builtin_shufflevector(v.r[i], v.r[i], (I ^ S)...);
      }(lane_numbers<V::W>{});
    }
  }
  return out;
}

// Combines the lanes of each group of G neighbours, by halves; every lane gets its group's result.
template <int G, class F, class X>
KGEN_FN X fold_groups(F f, X x) {
  if constexpr (G == 1) {
    return x;
  } else {
    return fold_groups<G / 2>(f, f(x, swap_lanes<G / 2>(x)));
  }
}

#define KGEN_REDUCTION(name, combine)                                                             \
  template <class A, class B>                                                                     \
  KGEN_FN auto join_##name(A a, B b) {                                                            \
    return combine(a, b);                                                                         \
  }                                                                                               \
  template <class Acc, class V, class W>                                                          \
  KGEN_FN Acc step_##name(Acc acc, V v, W w) {                                                    \
    const Acc next = combine(acc, v);                                                             \
    if constexpr (W::full) return next;                                                           \
    else return where_(w.mask(), next, acc);                                                      \
  }
#define KGEN_FOLD(name, combine)                                                                  \
  template <class X>                                                                              \
  KGEN_FN lane_t<X> fold_##name(X x) {                                                            \
    return fold_lanes([](auto a, auto b) KGEN_INLINE { return combine(a, b); }, x);               \
  }                                                                                               \
  template <int G, class X>                                                                       \
  KGEN_FN X fold_groups_##name(X x) {                                                             \
    return fold_groups<G>([](auto a, auto b) KGEN_INLINE { return combine(a, b); }, x);           \
  }
KGEN_REDUCTION(sum, add_)
KGEN_REDUCTION(prod, mul_)
KGEN_REDUCTION(max, maximum_)
KGEN_REDUCTION(min, minimum_)
KGEN_REDUCTION(any, or_)
KGEN_REDUCTION(all, and_)
KGEN_REDUCTION(bitxor, bitxor_)
KGEN_FOLD(sum, add_)
KGEN_FOLD(prod, mul_)
KGEN_FOLD(max, maximum_)
KGEN_FOLD(min, minimum_)
KGEN_FOLD(bitxor, bitxor_)
#undef KGEN_REDUCTION
#undef KGEN_FOLD
KGEN_FN bool fold_any(bool x) { return x; }
KGEN_FN bool fold_all(bool x) { return x; }
template <int L>
KGEN_FN bool fold_any(Mask<L> x) {
  return !none_of(x);
}
template <int L>
KGEN_FN bool fold_all(Mask<L> x) {
  return none_of(~x);
}

template <class X>
KGEN_FN X multiply_add(X a, X b, X c) {
  if constexpr (KGEN_X86) {
    return fma_(a, b, c);
  } else {
    return add_(mul_(a, b), c);
  }
}

// Mean and sum of squared deviations (m2). Welford, "Note on a method for calculating corrected sums of squares and products"
// (1962), and the pairwise combination of Chan, Golub and LeVeque (1979).
template <class T, int L>
struct Welford {
  using V = value_t<T, L>;

  V mean = splat<L>(T(0));
  V m2 = splat<L>(T(0));
  // The elements seen by each lane: `steps` by all of them, `extra` more by single lanes (after tails). While no lane differs
  // a step needs one scalar division.
  int64_t steps = 0;
  V extra = splat<L>(T(0));
  bool ragged = false;

  KGEN_FN V weight() const { return add_(extra, T(steps)); }
  // The number of elements; after fold.
  KGEN_FN int64_t count() const {
    static_assert(L == 1);
    return steps + int64_t(extra);
  }

  template <class X, class W>
  KGEN_FN void step(X x, W w) {
    const V v = coerce<V>(x);
    if constexpr (W::full) {
      ++steps;
      if (!ragged) {
        update(v, T(1) / T(steps));
      } else {
        update(v, truediv_(T(1), weight()));
      }
    } else {
      const Welford before = *this;
      const auto real = w.mask();
      extra = where_(real, add_(extra, T(1)), extra);
      update(v, truediv_(T(1), weight()));
      mean = where_(real, mean, before.mean);
      m2 = where_(real, m2, before.m2);
      ragged = true;
    }
  }

  KGEN_FN void join(const Welford& other) {
    const V mine = weight(), theirs = other.weight(), both = add_(mine, theirs);
    const V share = where_(gt_(both, T(0)), truediv_(theirs, both), T(0));
    const V delta = sub_(other.mean, mean);
    mean = multiply_add(delta, share, mean);
    // In this order: the square of a large delta overflows, and times the weight 0 of a lane without elements it were NaN.
    m2 = add_(add_(m2, other.m2), mul_(delta, mul_(delta, mul_(mine, share))));
    steps += other.steps;
    extra = add_(extra, other.extra);
    ragged = ragged || other.ragged;
  }

  KGEN_FN Welford<T, 1> fold() const {
    if constexpr (L == 1) {
      return *this;
    } else if constexpr (L == 4) {
      auto even = lane(0), odd = lane(1);
      even.join(lane(2));
      odd.join(lane(3));
      even.join(odd);
      return even;
    } else {
      Welford<T, L / 2> low{half_of<0>(mean), half_of<0>(m2), steps, half_of<0>(extra), ragged};
      low.join(Welford<T, L / 2>{half_of<1>(mean), half_of<1>(m2), steps, half_of<1>(extra), ragged});
      return low.fold();
    }
  }

  // Joins the lanes of each group of G neighbours; every lane gets its group's result.
  template <int G>
  KGEN_FN Welford fold_groups() const {
    if constexpr (G == 1) {
      return *this;
    } else {
      Welford out = *this;
      out.join({swap_lanes<G / 2>(mean), swap_lanes<G / 2>(m2), steps, swap_lanes<G / 2>(extra), ragged});
      return out.template fold_groups<G / 2>();
    }
  }

 private:
  template <class R>
  KGEN_FN void update(V v, R reciprocal) {
    const V delta = sub_(v, mean);
    mean = multiply_add(delta, coerce<V>(reciprocal), mean);
    m2 = multiply_add(delta, sub_(v, mean), m2);
  }
  KGEN_FN Welford<T, 1> lane(int i) const { return {mean[i], m2[i], steps + int64_t(extra[i]), T(0), false}; }
};

// The extreme value and the lowest position where it stands; NaN is more extreme than any number. Values of bool are kept as
// uint8_t. A position that is one scalar is the same for all lanes.
template <class T, int L, bool IsMax>
struct ArgExtreme {
  using C = std::conditional_t<std::is_same_v<T, bool>, uint8_t, T>;
  using V = value_t<C, L>;
  using I = value_t<int64_t, L>;

  static constexpr C worst() {
    if constexpr (std::is_floating_point_v<C>) {
      return IsMax ? -C(__builtin_inf()) : C(__builtin_inf());
    } else {
      constexpr C lowest = std::is_signed_v<C> ? C(C(1) << (8 * sizeof(C) - 1)) : C(0);
      return IsMax ? lowest : C(~lowest);
    }
  }

  V value = splat<L>(worst());
  I index = splat<L>(INT64_MAX);  // any position beats it, so that an input of `worst` values alone is found too

  template <class X, class P, class W>
  KGEN_FN void step(X x, P position, W w) {
    const V v = coerce<V>(cast_<C>(x));
    const I at = coerce<I>(position);
    auto better = beats(v, at);
    if constexpr (!W::full) better = and_(better, w.mask());
    value = where_(better, v, value);
    index = where_(better, at, index);
  }

  // For running extremes (cummax), where the last of equal values counts, and every NaN after the first.
  template <class X, class P, class W>
  KGEN_FN void step_last(X x, P position, W w) {
    const V v = coerce<V>(cast_<C>(x));
    auto better = IsMax ? ge_(v, value) : le_(v, value);
    if constexpr (std::is_floating_point_v<C>) better = or_(isnan_(v), and_(better, not_(isnan_(value))));
    if constexpr (!W::full) better = and_(better, w.mask());
    value = where_(better, v, value);
    index = where_(better, coerce<I>(position), index);
  }

  KGEN_FN void join(const ArgExtreme& other) { step(other.value, other.index, Full<L>{}); }

  KGEN_FN ArgExtreme<T, 1, IsMax> fold() const {
    if constexpr (L == 1) {
      return *this;
    } else if constexpr (L == 4) {
      ArgExtreme<T, 1, IsMax> out{value[0], index[0]};
      for (int i = 1; i < 4; ++i) out.join({value[i], index[i]});
      return out;
    } else {
      ArgExtreme<T, L / 2, IsMax> low{half_of<0>(value), half_of<0>(index)};
      low.join({half_of<1>(value), half_of<1>(index)});
      return low.fold();
    }
  }

 private:
  KGEN_FN value_t<bool, L> beats(V v, I at) const {
    const auto wins = IsMax ? gt_(v, value) : lt_(v, value);
    const auto earlier = lt_(at, index);
    if constexpr (std::is_floating_point_v<C>) {
      const auto nan = isnan_(v), had_nan = isnan_(value);
      const auto ties = or_(eq_(v, value), and_(nan, had_nan));
      return or_(or_(wins, and_(nan, not_(had_nan))), and_(earlier, ties));
    } else {
      return or_(wins, and_(earlier, eq_(v, value)));
    }
  }
};

}  // namespace kgen
