// Attention: rows of queries times keys, any function of these scores, softmax along the keys, times values. The softmax is online
// (Milakov and Gimelshein, 2018; blocked as in FlashAttention, Dao et al., 2022): a block of scores lies in a thread's cache, and
// no other score is anywhere.
//
//   const auto open = [&](int64_t b, const auto& use) { use(queries, keys, values); };   // operands (pack.h) of one batch
//   const auto score = [&](int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns, float* tile, int64_t ld) {...};
//   const auto store = the same, of finished results;
//   attention<bfloat16, bfloat16>(threads, {B, M, N, D, V}, {.m = 96, .n = 256, .v = 64}, false, open, score, nullptr, store);
//
// Element (n, v) of the values is operand element (i, k) = (n, v), as for keys (n, d). `score` changes a tile of scores in place;
// nullptr: they stay as they are. `masked(b, m0, n0, rows, columns)` may say that all scores of a rectangle are -inf: it is left
// out. `store` gets each result once, in rectangles that begin at multiples of `how.m` and `how.v`.
//
// Packed keys and values of a batch are kept while a thread goes through rows of queries, up to `kKeptBytes`, and for the next
// batch where its operands lie at the same place, as heads that share keys do. A few rows read keys and values where they lie.
#pragma once

#include "matmul.h"
#include "reduce.h"

namespace kgen {

struct AttentionShape {
  int64_t b, m, n, d, v;
};
// Rows of queries and keys of a block of scores, and columns of values that `store` gets at once.
struct AttentionBlocks {
  int64_t m, n, v;
};

// Bytes of packed keys and values that a thread keeps for the rows to come.
inline constexpr int64_t kKeptBytes = 24 << 20;
// At most so many rows read keys and values where they lie.
inline constexpr int64_t kFewQueries = 4;
// Rows of scores that go through the softmax at a time.
inline constexpr int64_t kStrip = 16;

// An operand whose axes are exchanged: values, whose columns are v and whose sums go over keys.
template <class S>
struct Exchanged {
  using Element = typename S::Element;
  static constexpr bool in_place = S::in_place;
  const S& from;

  KGEN_FN Strided<Element> view(int64_t i, int64_t ni, int64_t k, int64_t nk, Element* room) const {
    const auto found = from.view(k, nk, i, ni, room);
    return {found.data, found.k_stride, found.i_stride};
  }
  KGEN_FN bool along_k() const {
    if constexpr (in_place) return from.i_stride == 1;
    else return !from.along_k();
  }
};

// acc[r * ld + v] (+)= sum over keys n of weights[r * ldw + n] * values(n, v), of values that are neighbours along v.
template <class Acc, class T, int Rows>
KGEN_FN void add_weighted_rows(Strided<T> values, int64_t keys, int64_t columns, const Acc* weights, int64_t ldw, Acc* acc,
                               int64_t ld) {
  constexpr int L = larger(4, kRegisterBytes / int(sizeof(Acc))), Some = 4;
  const auto strip = [&](int64_t v, auto count, auto w) KGEN_INLINE {
    Vec<Acc, L> sums[Rows * count.value];
    KGEN_UNROLL for (int i = 0; i < Rows * count.value; ++i) {
      sums[i] = load<L>(acc + i / count.value * ld + v + i % count.value * L, w);
    }
    for (int64_t n = 0; n < keys; ++n) {
      Vec<Acc, L> row[count.value];
      KGEN_UNROLL for (int c = 0; c < count.value; ++c) {
        row[c] = cast_<Acc>(load<L>(values.data + n * values.i_stride + v + c * L, w));
      }
      KGEN_UNROLL for (int i = 0; i < Rows * count.value; ++i) {
        sums[i] = multiply_add(row[i % count.value], splat<L>(weights[i / count.value * ldw + n]), sums[i]);
      }
    }
    KGEN_UNROLL for (int i = 0; i < Rows * count.value; ++i) {
      store(acc + i / count.value * ld + v + i % count.value * L, sums[i], w);
    }
  };
  int64_t v = 0;
  for (; v + Some * L <= columns; v += Some * L) strip(v, std::integral_constant<int, Some>{}, Full<L>{});
  vector_loop<L>(v, columns, [&](int64_t at, auto w) KGEN_INLINE { strip(at, std::integral_constant<int, 1>{}, w); });
}
template <class Acc, class T>
[[gnu::noinline]] void add_weighted(Strided<T> values, int64_t keys, int64_t columns, const Acc* weights, int64_t ldw, int64_t rows,
                                    Acc* acc, int64_t ld) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) add_weighted_rows<Acc, T, 4>(values, keys, columns, weights + r * ldw, ldw, acc + r * ld, ld);
  for (; r < rows; ++r) add_weighted_rows<Acc, T, 1>(values, keys, columns, weights + r * ldw, ldw, acc + r * ld, ld);
}

// The operands of one batch. `place`s tell whether another batch's keys and values are the same memory; null: they may not be.
template <class U>
struct AttentionOperands {
  Operand<U> queries, keys, values;
  const void *keys_place, *values_place;
  bool values_along_v;
  // Adds weighted rows of values n0, ..., n0 + keys - 1 to `acc`.
  void (*add_weighted)(const void* values, int64_t n0, int64_t keys, int64_t columns, const typename U::Acc* weights, int64_t ldw,
                       int64_t rows, typename U::Acc* acc, int64_t ld, void* room);

  bool takes_few_rows() const { return keys.dots != nullptr && keys.along_k && values_along_v; }
};

// What is computed, its types hidden: all kernels of a unit share the loops.
template <class U>
struct Attention {
  using Acc = typename U::Acc;
  using Then = void (*)(void* run, const AttentionOperands<U>& operands);
  AttentionShape shape;
  AttentionBlocks how;
  bool safe;  // rows that are -inf as a whole give zeros, not NaN
  const void* self;
  void (*open)(const void* self, int64_t b, void* run, Then then);
  void (*score)(const void* self, int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns, Acc* tile, int64_t ld);
  bool (*masked)(const void* self, int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns);
  void (*store)(const void* self, int64_t b, int64_t m0, int64_t v0, int64_t rows, int64_t columns, const Acc* tile, int64_t ld);
};

// The running maximum of each row, the sum of its weights, and by what these shrank with the last block.
template <class Acc>
struct RowStates {
  Acc *top, *total, *kept;
};

// Where the weights of a row go: word k at `to[k / L * step]` and the L - 1 after it, as pack_row_panels places them.
template <class Word>
struct WeightRow {
  Word* to;
  int64_t step;
};

// Weights of two registers of scores as one of words: numbers, or pairs.
template <class U>
struct WeightWords {
  using Acc = typename U::Acc;
  using Word = typename U::Word;
  static constexpr int L = word_lanes<U>, E = U::elements;
  using V = Vec<Acc, L>;

  KGEN_FN static void put(Word* to, const V (&weights)[E]) {
    if constexpr (E == 1) {
      store(to, weights[0], Full<L>{});
    } else {
#if KGEN_BF16_DOT
      const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)weights[1].r[0], (__m512)weights[0].r[0]);
      __builtin_memcpy(to, &pairs, sizeof(pairs));
#endif
    }
  }
};

template <class U>
class AttentionRun {
  using Word = typename U::Word;
  using Acc = typename U::Acc;
  static constexpr int L = word_lanes<U>, E = U::elements;
  static constexpr int64_t P = kPanel<U>, depth = kDepth<U> * E;
  using V = Vec<Acc, L>;
  static constexpr Acc lowest = -std::numeric_limits<Acc>::infinity();

 public:
  explicit AttentionRun(const Attention<U>& all) : all_(all), shape_(all.shape) {
    rows_ = smaller(round_up(all.how.m, U::row_step), round_up(shape_.m, larger<int64_t>(U::row_step, kDotRows)));
    row_step_ = all.how.m;
    block_ = smaller(round_up(smaller(all.how.n, depth), P), round_up(shape_.n, P));
    blocks_ = pieces(shape_.n, block_);
    depths_ = pieces(shape_.d, depth);
    key_panel_ = P * packed_depth<U>(shape_.d);
    value_panel_ = P * packed_depth<U>(block_);
    key_words_ = block_ / P * key_panel_;
    value_words_ = pieces(shape_.v, P) * value_panel_;
    const bool again = pieces(shape_.m, row_step_) > 1;
    kept_ = blocks_ == 1 || (again && blocks_ * (key_words_ + value_words_) * int64_t(sizeof(Word)) <= kKeptBytes);
    score_ld_ = block_ + 64 / sizeof(Acc);  // rows a power of two apart would push each other out of L1
    result_ld_ = round_up(shape_.v, P) + 64 / sizeof(Acc);
  }

  // Tasks are runs of blocks of rows: each thread packs the keys of what it computes.
  void run(int threads) {
    const int64_t down = pieces(shape_.m, row_step_), wanted = 4 * int64_t(threads);
    const int64_t shares = smaller(down, threads > 1 ? pieces(wanted, shape_.b) : 1), each = pieces(down, shares);
    parallel_team(threads, [&] {
      Thread own = {};
      team_share(shape_.b * pieces(down, each), [&](int64_t task) {
        const int64_t b = task / pieces(down, each), first = task % pieces(down, each) * each;
        own.run = this;
        own.b = b;
        own.begin = first * row_step_;
        own.end = smaller(shape_.m, (first + each) * row_step_);
        all_.open(all_.self, b, &own, [](void* self, const AttentionOperands<U>& operands) {
          auto* const thread = static_cast<Thread*>(self);
          thread->run->rows_of(*thread, operands);
        });
      });
    });
  }

 private:
  // Of a thread: what it computes now, and its memory.
  struct Thread {
    AttentionRun* run;
    int64_t b, begin, end;
    int64_t packed_b;
    const void *packed_keys, *packed_values;
    bool any;  // whether `packed` says something of these
    Word *queries, *keys, *values, *weights;
    Acc *scores, *results;
    RowStates<Acc> states;
    char* packed;  // by blocks of keys
    void* room;
  };
  // Keys that a block of rows has to look at: of a block, from the panel that begins with key `begin`.
  struct Span {
    int64_t begin, end;
  };

  int64_t count_of_blocks() const { return kept_ ? blocks_ : 1; }

  // Where the thread's memory lies: it may have grown since.
  void place(Thread& own, const AttentionOperands<U>& operands) const {
    const int64_t room = larger(larger(operands.queries.room(kStrip, larger(depth, shape_.d)), operands.keys.room(P, depth)),
                                larger(operands.values.room(P, block_), larger(operands.keys.room(kFilledDots, shape_.d),
                                                                               operands.values.room(shape_.v, block_))));
    const int64_t padded = round_up(rows_, kStrip), query_words = larger(rows_ * kDepth<U> * depths_, rows_ * packed_depth<U>(shape_.d));
    const int64_t bytes = Rooms::bytes<Word>(query_words) + Rooms::bytes<Word>(key_words_ * count_of_blocks()) +
                          Rooms::bytes<Word>(value_words_ * count_of_blocks()) + Rooms::bytes<Word>(rows_ * kDepth<U>) +
                          Rooms::bytes<Acc>(padded * score_ld_) + Rooms::bytes<Acc>(rows_ * result_ld_) +
                          3 * Rooms::bytes<Acc>(padded) + Rooms::bytes<char>(blocks_) + room;
    Rooms from(scratch<1>(bytes));
    own.queries = from.template take<Word>(query_words);
    own.keys = from.template take<Word>(key_words_ * count_of_blocks());
    own.values = from.template take<Word>(value_words_ * count_of_blocks());
    own.weights = from.template take<Word>(rows_ * kDepth<U>);
    own.scores = from.template take<Acc>(padded * score_ld_);
    own.results = from.template take<Acc>(rows_ * result_ld_);
    own.states = {from.template take<Acc>(padded), from.template take<Acc>(padded), from.template take<Acc>(padded)};
    own.packed = from.template take<char>(blocks_);
    own.room = from.template take<char>(0);
  }

  // Whether the packed keys and values are those of this batch.
  bool is_packed(const Thread& own, const AttentionOperands<U>& operands) const {
    if (!own.any) return false;
    if (own.packed_b == own.b) return true;
    return operands.keys_place != nullptr && operands.values_place != nullptr && operands.keys_place == own.packed_keys &&
           operands.values_place == own.packed_values;
  }

  void rows_of(Thread& own, const AttentionOperands<U>& operands) const {
    [[maybe_unused]] const tiles_t<U> registers;
    const bool first = own.scores == nullptr;
    place(own, operands);
    if (first) clear(own);
    if (!is_packed(own, operands)) {
      for (int64_t i = 0; i < blocks_; ++i) own.packed[i] = 0;
      own.any = true;
    }
    own.packed_b = own.b;
    own.packed_keys = operands.keys_place;
    own.packed_values = operands.values_place;
    for (int64_t m = own.begin; m < own.end; m += row_step_) some_rows(own, operands, m, smaller(row_step_, own.end - m));
  }

  // What padding reads has to be numbers: a few of those that memory may hold are slow.
  void clear(const Thread& own) const {
    for (int64_t i = 0; i < rows_ * kDepth<U>; ++i) own.weights[i] = Word(0);
    for (int64_t i = 0; i < rows_ * result_ld_; ++i) own.results[i] = Acc(0);
  }

  void some_rows(const Thread& own, const AttentionOperands<U>& operands, int64_t m, int64_t rows) const {
    const bool few = rows <= kFewQueries && operands.takes_few_rows();
    for (int64_t i = 0; i < round_up(rows, kStrip); ++i) {
      own.states.top[i] = lowest;
      own.states.total[i] = Acc(0);
    }
    few ? pack_few(own, operands, m, rows) : pack_queries(own, operands, m, rows);
    bool first = true;
    for (int64_t i = 0; i < blocks_; ++i) {
      const Span span = span_of(own.b, m, rows, i * block_);
      if (span.begin == span.end) continue;
      few ? few_scores(own, operands, m, rows, i, span, first) : block_of_scores(own, operands, m, rows, i, span, first);
      first = false;
    }
    finish(own, m, rows, first);
  }

  // The keys of a block that are not masked for all rows, to whole panels.
  Span span_of(int64_t b, int64_t m, int64_t rows, int64_t n) const {
    Span out{n, smaller(n + block_, shape_.n)};
    if (all_.masked == nullptr) return out;
    if (all_.masked(all_.self, b, m, n, rows, out.end - n)) return {n, n};
    while (out.end > out.begin) {
      const int64_t last = (out.end - 1) / P * P;
      if (!all_.masked(all_.self, b, m, last, rows, out.end - last)) break;
      out.end = last;
    }
    while (out.begin + P < out.end && all_.masked(all_.self, b, m, out.begin, rows, P)) out.begin += P;
    return out;
  }

  // ---- many rows ------------------------------------------------------------------------------------------------------

  void pack_queries(const Thread& own, const AttentionOperands<U>& operands, int64_t m, int64_t rows) const {
    const int64_t padded = round_up(rows, U::row_step);
    for (int64_t d = 0; d < depths_; ++d) {
      Word* const to = own.queries + d * rows_ * kDepth<U>;
      // a panel at a time: its rows need room
      for (int64_t r = 0; r < padded; r += kRows<U>) {
        const int64_t count = panel_rows<U>(padded - r), real = smaller(count, rows - r);
        const Block block{m + r, larger<int64_t>(real, 0), d * depth, smaller(depth, shape_.d - d * depth)};
        operands.queries.pack_row_panels(operands.queries.self, block, count, {kRows<U>, kDepth<U>}, to + r * kDepth<U>, own.room);
      }
    }
  }

  void pack_block(const Thread& own, const AttentionOperands<U>& operands, int64_t i, Word* keys, Word* values) const {
    const int64_t n = i * block_, count = smaller(block_, shape_.n - n);
    for (int64_t j = 0; j < count; j += P) {
      for (int64_t d = 0; d < shape_.d; d += depth) {
        const Block block{n + j, smaller(P, count - j), d, smaller(depth, shape_.d - d)};
        operands.keys.pack_panels(operands.keys.self, block, keys + j / P * key_panel_ + d / E * P, own.room);
      }
    }
    for (int64_t v = 0; v < shape_.v; v += P) {
      const Block block{v, smaller(P, shape_.v - v), n, count};
      operands.values.pack_panels(operands.values.self, block, values + v / P * value_panel_, own.room);
    }
  }

  void block_of_scores(const Thread& own, const AttentionOperands<U>& operands, int64_t m, int64_t rows, int64_t i, Span span,
                       bool first) const {
    const int64_t padded = round_up(rows, U::row_step), place = kept_ ? i : 0;
    Word *const keys = own.keys + place * key_words_, *const values = own.values + place * value_words_;
    if (!kept_ || !own.packed[i]) {
      pack_block(own, operands, i, keys, values);
      own.packed[i] = 1;
    }
    const int64_t begin = span.begin - i * block_, count = span.end - span.begin;
    for (int64_t j = 0; j < count; j += P) {
      for (int64_t d = 0; d < depths_; ++d) {
        const int64_t words = words_of<U>(smaller(depth, shape_.d - d * depth));
        multiply_panel<U>(own.queries + d * rows_ * kDepth<U>, keys + (begin + j) / P * key_panel_ + d * kDepth<U> * P, words,
                          own.scores + j, score_ld_, padded, d == 0);
      }
    }
    weigh<true>(own, m, rows, span);
    if (!first) shrink(own, rows);
    const int64_t words = words_of<U>(count);
    for (int64_t v = 0; v < shape_.v; v += P) {
      multiply_panel<U>(own.weights, values + v / P * value_panel_ + begin / E * P, words, own.results + v, result_ld_, padded, first);
    }
  }

  // ---- a few rows -----------------------------------------------------------------------------------------------------

  void pack_few(const Thread& own, const AttentionOperands<U>& operands, int64_t m, int64_t rows) const {
    const int64_t words = packed_depth<U>(shape_.d);
    operands.queries.pack_row_panels(operands.queries.self, {m, rows, 0, shape_.d}, round_up(rows, kDotRows), {kDotRows, words},
                                     own.queries, own.room);
  }

  void few_scores(const Thread& own, const AttentionOperands<U>& operands, int64_t m, int64_t rows, int64_t, Span span,
                  bool first) const {
    const Block block{span.begin, span.end - span.begin, 0, shape_.d};
    operands.keys.dots(operands.keys.self, block, own.queries, packed_depth<U>(shape_.d), round_up(rows, kDotRows), own.scores,
                       score_ld_, true, own.room);
    weigh<false>(own, m, rows, span);
    if (first) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t v = 0; v < shape_.v; ++v) own.results[r * result_ld_ + v] = Acc(0);
      }
    } else {
      shrink(own, rows);
    }
    operands.add_weighted(operands.values.self, span.begin, span.end - span.begin, shape_.v, own.scores, score_ld_, rows,
                          own.results, result_ld_, own.room);
  }

  // ---- softmax --------------------------------------------------------------------------------------------------------

  // Makes weights of scores: packed as rows of the next product, or (a few rows) in their place.
  template <bool Packed>
  void weigh(const Thread& own, int64_t m, int64_t rows, Span span) const {
    const int64_t count = span.end - span.begin;
    for (int64_t r = 0; r < rows; r += kStrip) {
      const int64_t some = smaller(kStrip, rows - r);
      Acc* const strip = own.scores + r * score_ld_;
      if (all_.score != nullptr) all_.score(all_.self, own.b, m + r, span.begin, some, count, strip, score_ld_);
      alignas(64) Acc shift[kStrip];
      raise(own, r, some, count, shift);
      for (int64_t j = 0; j < some; ++j) {
        const int64_t row = r + j;
        Acc sum;
        if constexpr (Packed) sum = pack_weights(strip + j * score_ld_, count, shift[j], weights_of(own, row, rows));
        else sum = keep_weights(strip + j * score_ld_, count, shift[j]);
        own.states.total[row] = own.states.total[row] * own.states.kept[row] + sum;
      }
    }
  }

  // The new maxima of a strip's rows, what scores are shifted by, and what is kept of the sums so far.
  KGEN_FN void raise(const Thread& own, int64_t r, int64_t some, int64_t count, Acc* shift) const {
    for (int64_t j = 0; j < some; ++j) {
      const Acc* const row = own.scores + (r + j) * score_ld_;
      V high = splat<L>(own.states.top[r + j]), other = high;
      int64_t n = 0;
      for (; n + 2 * L <= count; n += 2 * L) {
        high = maximum_(high, load<L>(row + n, Full<L>{}));
        other = maximum_(other, load<L>(row + n + L, Full<L>{}));
      }
      vector_loop<L>(n, count, [&](int64_t at, auto w) KGEN_INLINE { high = step_max(high, load<L>(row + at, w), w); });
      shift[j] = fold_max(maximum_(high, other));
    }
    for (int64_t j = some; j < kStrip; ++j) shift[j] = lowest;
    for (int64_t j = 0; j < kStrip; j += L) {
      const V before = load<L>(own.states.top + r + j, Full<L>{}), now = load<L>(shift + j, Full<L>{});
      const V by = where_(eq_(now, splat<L>(lowest)), splat<L>(Acc(0)), now);
      store(own.states.top + r + j, now, Full<L>{});
      store(own.states.kept + r + j, exp_(sub_(before, by)), Full<L>{});
      store(shift + j, by, Full<L>{});
    }
  }

  WeightRow<Word> weights_of(const Thread& own, int64_t row, int64_t rows) const {
    const int64_t first = row / kRows<U> * kRows<U>, panel = panel_rows<U>(round_up(rows, U::row_step) - first);
    return {own.weights + first * kDepth<U> + (row - first) * L, panel * L};
  }

  // Writes whole instructions' words, zeros behind the last key; gives the sum.
  KGEN_FN static Acc pack_weights(const Acc* scores, int64_t count, Acc shift, WeightRow<Word> row) {
    V sums[2] = {splat<L>(Acc(0)), splat<L>(Acc(0))};
    int64_t n = 0;
    for (; n + E * L <= count; n += E * L, row.to += row.step) {
      V weights[E];
      KGEN_UNROLL for (int e = 0; e < E; ++e) {
        weights[e] = exp_(sub_(load<L>(scores + n + e * L, Full<L>{}), splat<L>(shift)));
        sums[e] = add_(sums[e], weights[e]);
      }
      WeightWords<U>::put(row.to, weights);
    }
    if (n < count) {
      V weights[E];
      KGEN_UNROLL for (int e = 0; e < E; ++e) {
        const int64_t left = count - n - e * L;
        weights[e] = splat<L>(Acc(0));
        if (left >= L) {
          weights[e] = exp_(sub_(load<L>(scores + n + e * L, Full<L>{}), splat<L>(shift)));
        } else if (left > 0) {
          const Tail<L> w{left};
          weights[e] = where_(w.mask(), exp_(sub_(load<L>(scores + n + e * L, w), splat<L>(shift))), weights[e]);
        }
        sums[e] = add_(sums[e], weights[e]);
      }
      WeightWords<U>::put(row.to, weights);
    }
    return fold_sum(add_(sums[0], sums[1]));
  }

  KGEN_FN static Acc keep_weights(Acc* scores, int64_t count, Acc shift) {
    V sum = splat<L>(Acc(0));
    vector_loop<L>(0, count, [&](int64_t n, auto w) KGEN_INLINE {
      const V weights = exp_(sub_(load<L>(scores + n, w), splat<L>(shift)));
      store(scores + n, weights, w);
      sum = step_sum(sum, weights, w);
    });
    return fold_sum(sum);
  }

  // Results so far, for the new maxima.
  void shrink(const Thread& own, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (own.states.kept[r] != Acc(1)) scale(own.results + r * result_ld_, own.states.kept[r]);
    }
  }
  void scale(Acc* row, Acc by) const {
    vector_loop<L>(0, shape_.v, [&](int64_t v, auto w) KGEN_INLINE { store(row + v, mul_(load<L>(row + v, w), splat<L>(by)), w); });
  }

  // Divides by the sums of weights and stores. Where no key was looked at there is no weight either.
  void finish(const Thread& own, int64_t m, int64_t rows, bool none) const {
    for (int64_t r = 0; r < rows; ++r) {
      const bool empty = own.states.top[r] == lowest;
      if (none || (empty && all_.safe)) {
        const Acc value = all_.safe ? Acc(0) : std::numeric_limits<Acc>::quiet_NaN();
        for (int64_t v = 0; v < shape_.v; ++v) own.results[r * result_ld_ + v] = value;
      } else {
        scale(own.results + r * result_ld_, Acc(1) / own.states.total[r]);
      }
    }
    for (int64_t v = 0; v < shape_.v; v += all_.how.v) {
      all_.store(all_.self, own.b, m, v, rows, smaller(all_.how.v, shape_.v - v), own.results + v, result_ld_);
    }
  }

  const Attention<U>& all_;
  AttentionShape shape_;
  int64_t rows_, row_step_, block_, blocks_, depths_, key_panel_, value_panel_, key_words_, value_words_, score_ld_, result_ld_;
  bool kept_;
};

template <class U>
[[gnu::noinline]] void attend(int threads, const Attention<U>& all) {
  if (all.shape.b <= 0 || all.shape.m <= 0 || all.shape.v <= 0) return;
  const int64_t work = all.shape.b * larger<int64_t>(all.shape.m, 8) * all.shape.n * (all.shape.d + all.shape.v);
  AttentionRun<U>(all).run(useful_threads(threads, work));
}

// An operand that is packed, but never multiplies a few rows as a whole.
template <class U, class S>
KGEN_FN Operand<U> packed_operand_of(const S& from) {
  using F = OperandFunctions<U, S>;
  return {&from, from.along_k(), S::in_place, S::in_place ? 0 : int64_t(sizeof(typename S::Element)), nullptr, F::row_panels,
          F::panels, nullptr};
}
// The same, whose columns may be read where they lie.
template <class U, class S>
KGEN_FN Operand<U> keys_of(const S& from) {
  Operand<U> out = packed_operand_of<U>(from);
  if constexpr (may_lie_along_k<S>) out.dots = OperandFunctions<U, S>::dots;
  return out;
}

template <class S>
KGEN_FN const void* place_of(const S& from) {
  if constexpr (S::in_place) return from.data;
  else return nullptr;
}

// How generated code's functions are called.
template <class U, class Open, class Score, class Masked, class Store>
struct AttentionFunctions {
  using Acc = typename U::Acc;
  const Open& open;
  const Score& score;
  const Masked& masked;
  const Store& store;

  static const AttentionFunctions& of(const void* self) { return *static_cast<const AttentionFunctions*>(self); }
  static void opened(const void* self, int64_t b, void* run, typename Attention<U>::Then then) {
    of(self).open(b, [&](const auto& queries, const auto& keys, const auto& values) KGEN_INLINE {
      using S = std::decay_t<decltype(values)>;
      const Exchanged<S> columns{values};
      then(run, {packed_operand_of<U>(queries), keys_of<U>(keys), packed_operand_of<U>(columns), place_of(keys),
                 place_of(values), values.along_k(), weighted<S>});
    });
  }
  template <class S>
  static void weighted(const void* values, int64_t n0, int64_t keys, int64_t columns, const Acc* weights, int64_t ldw, int64_t rows,
                       Acc* acc, int64_t ld, void* room) {
    const auto view = static_cast<const Exchanged<S>*>(values)->view(0, columns, n0, keys, static_cast<typename S::Element*>(room));
    add_weighted<Acc>(Strided<typename S::Element>{view.data, view.k_stride, view.i_stride}, keys, columns, weights, ldw, rows, acc, ld);
  }
  static void scored(const void* self, int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns, Acc* tile, int64_t ld) {
    if constexpr (!std::is_null_pointer_v<Score>) of(self).score(b, m0, n0, rows, columns, tile, ld);
  }
  static bool is_masked(const void* self, int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns) {
    if constexpr (!std::is_null_pointer_v<Masked>) return of(self).masked(b, m0, n0, rows, columns);
    else return false;
  }
  static void stored(const void* self, int64_t b, int64_t m0, int64_t v0, int64_t rows, int64_t columns, const Acc* tile, int64_t ld) {
    of(self).store(b, m0, v0, rows, columns, tile, ld);
  }
};

// Attention of queries and keys of element types A and B, see the head of this file.
template <class A, class B, class Open, class Score, class Masked, class Store>
KGEN_FN void attention(int threads, const AttentionShape& shape, const AttentionBlocks& how, bool safe, const Open& open,
                       const Score& score, const Masked& masked, const Store& store) {
  using U = unit_t<A, B>;
  using F = AttentionFunctions<U, Open, Score, Masked, Store>;
  const F functions{open, score, masked, store};
  attend<U>(threads, {shape, how, safe, &functions, F::opened, std::is_null_pointer_v<Score> ? nullptr : F::scored,
                      std::is_null_pointer_v<Masked> ? nullptr : F::is_masked, F::stored});
}

}  // namespace kgen

// As KGEN_PRODUCT, of attention.
#ifdef KGEN_OWN_LOOPS
#define KGEN_ATTENTION(A, B)
#else
#define KGEN_ATTENTION(A, B)             \
  KGEN_LOOPS_OF_ATTENTION(extern, A, B)  \
  KGEN_LOOPS_OF_PACKING(extern, A, B, A) \
  KGEN_LOOPS_OF_PACKING(extern, A, B, B)
#endif
// The object with the loops over blocks of scores.
#define KGEN_LOOPS_OF_ATTENTION(how, A, B)                                                                                     \
  namespace kgen {                                                                                                             \
  how template void attend<unit_t<A, B>>(int, const Attention<unit_t<A, B>>&);                                                 \
  how template void add_weighted(Strided<B>, int64_t, int64_t, const unit_t<A, B>::Acc*, int64_t, int64_t, unit_t<A, B>::Acc*, \
                                 int64_t);                                                                                     \
  }
