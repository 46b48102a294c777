// Attention: rows of queries times keys, any function of these scores, softmax along the keys, times values. The softmax is online
// (Milakov and Gimelshein, 2018; blocked as in FlashAttention, Dao et al., 2022): a block of scores is in a thread's cache, and
// no other score is anywhere.
//
//   const auto open = [&](int64_t b, const auto& use) { use(queries, keys, values); };   // operands (pack.h) of one batch
//   const auto score = [&](int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns, float* tile, int64_t ld) {...};
//   const auto store = the same, of finished results;
//   attention<bfloat16, bfloat16>(threads, {B, M, N, D, V}, {.m = 96, .n = 256, .v = 64}, false, open, score, nullptr, kNoFill, nullptr,
//                                 store);
//
// Element (n, v) of the values is operand element (i, k) = (n, v), as for keys (n, d). `score` changes a tile of scores in place;
// nullptr: they stay as they are. `reach(b, m0, rows)` may say which keys these rows need to look at, as a KeySpan: scores of others are
// -inf, or the finite number `fill`: then rows look at others after all, unless the weight of that number is 0 in each of them.
// `rows(b, m0, rows, lse)` gets the log-sum-exp of each row of scores, unless it is nullptr. `store` gets each result once, in rectangles that begin at multiples of `how.m` and `how.v`.
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
// Keys from `begin` on, before `end`.
struct KeySpan {
  int64_t begin, end;
};
// Rows of queries and keys of a block of scores, and columns of values that `store` gets at once.
struct AttentionBlocks {
  int64_t m, n, v;
};

// No scores are masked by a finite number.
inline constexpr double kNoFill = -std::numeric_limits<double>::infinity();
// Bytes of packed keys and values that a thread keeps for the rows to come.
inline constexpr int64_t kKeptBytes = 24 << 20;
// At most so many rows read keys and values where they lie.
inline constexpr int64_t kFewQueries = 4;

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

// acc[r * ld + v] += sum over keys n of weights[r * ldw + n] * values(n, v), of values that are neighbours along v.
template <class Acc, class T, int Rows>
KGEN_FN void add_weighted_rows(Strided<T> values, int64_t keys, int64_t columns, const Acc* weights, int64_t ldw, Acc* acc,
                               int64_t ld) {
  constexpr int L = larger(4, kRegisterBytes / int(sizeof(Acc))), Some = Rows == 1 ? 8 : 4;
  constexpr int64_t ahead = 8;  // rows of values that are asked for in advance
  const auto strip = [&](int64_t v, auto count, auto w) KGEN_INLINE {
    constexpr int Count = count.value;
    Vec<Acc, L> sums[Rows * Count];
    KGEN_UNROLL for (int i = 0; i < Rows * Count; ++i) sums[i] = load<L>(acc + i / Count * ld + v + i % Count * L, w);
    const T* row = values.data + v;
    for (int64_t n = 0; n < keys; ++n, row += values.i_stride) {
      Vec<Acc, L> value[Count];
      KGEN_UNROLL for (int c = 0; c < Count; ++c) {
        if constexpr (sizeof(T) * L >= 64 || Count == 1) __builtin_prefetch(row + ahead * values.i_stride + c * L);
        else if (c % 2 == 0) __builtin_prefetch(row + ahead * values.i_stride + c * L);
        value[c] = load<L>(row + c * L, w);
      }
      KGEN_UNROLL for (int i = 0; i < Rows * Count; ++i) {
        sums[i] = multiply_add(value[i % Count], splat<L>(weights[i / Count * ldw + n]), sums[i]);
      }
    }
    KGEN_UNROLL for (int i = 0; i < Rows * Count; ++i) store(acc + i / Count * ld + v + i % Count * L, sums[i], w);
  };
  int64_t v = 0;
  for (; v + Some * L <= columns; v += Some * L) strip(v, std::integral_constant<int, Some>{}, Full<L>{});
  if (v + 4 * L <= columns) {
    strip(v, std::integral_constant<int, 4>{}, Full<L>{});
    v += 4 * L;
  }
  vector_loop<L>(v, columns, [&](int64_t at, auto w) KGEN_INLINE { strip(at, std::integral_constant<int, 1>{}, w); });
}
template <class Acc, class T>
[[gnu::noinline]] void add_weighted(Strided<T> values, int64_t keys, int64_t columns, const Acc* weights, int64_t ldw, int64_t rows,
                                    Acc* acc, int64_t ld) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) add_weighted_rows<Acc, T, 4>(values, keys, columns, weights + r * ldw, ldw, acc + r * ld, ld);
  for (; r < rows; ++r) add_weighted_rows<Acc, T, 1>(values, keys, columns, weights + r * ldw, ldw, acc + r * ld, ld);
}

// c[r * ldc + j] = the dot products of `rows` rows (word k of row r at x[r * words + k]) with all columns, whose k are neighbours.
template <class U, class T>
[[gnu::noinline]] void dot_few(const typename U::Word* x, int64_t words, int64_t rows, Words<U, T> b, typename U::Acc* c, int64_t ldc) {
  constexpr int Columns = 8;
  const Next next{.far = 3 * Columns * b.view.i_stride, .near = Columns * b.view.i_stride};
  for (int64_t n = 0; n < b.ni; n += Columns) {
    const Words<U, T> some{b.view.view(n, 0, 0, 0, nullptr), b.ni - n, b.nk};
    for (int64_t r = 0; r < rows; ++r) {
      typename U::Acc* const to = c + r * ldc + n;
      for (int64_t j = 0; j < smaller<int64_t>(Columns, b.ni - n); ++j) to[j] = 0;
      dot_columns<U, 1, Columns>(x + r * words, kDepth<U>, some, to, ldc, next);
    }
  }
}

// The operands of one batch. `place`s tell whether another batch's keys and values are the same memory; null: they may not be.
template <class U>
struct AttentionOperands {
  Operand<U> queries, keys, values;
  const void *keys_place, *values_place;
  bool values_along_v;
  // Scores of a few packed rows with a block of keys.
  void (*dots)(const void* keys, Block block, const typename U::Word* x, int64_t words, int64_t rows, typename U::Acc* c, int64_t ldc,
               void* room);
  // Adds weighted rows of values n0, ..., n0 + keys - 1 to `acc`.
  void (*add_weighted)(const void* values, int64_t n0, int64_t keys, int64_t columns, const typename U::Acc* weights, int64_t ldw,
                       int64_t rows, typename U::Acc* acc, int64_t ld, void* room);

  bool takes_few_rows() const { return keys.along_k && values_along_v; }
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
  KeySpan (*reach)(const void* self, int64_t b, int64_t m0, int64_t rows);
  double fill;
  void (*rows)(const void* self, int64_t b, int64_t m0, int64_t rows, const Acc* lse);
  void (*store)(const void* self, int64_t b, int64_t m0, int64_t v0, int64_t rows, int64_t columns, const Acc* tile, int64_t ld);
};

// Where the weights of a row go: L words at `to`, the next ones `step` further, as pack_row_panels places them.
template <class Word>
struct WeightRow {
  Word* to;
  int64_t step;
};

// Numbers, or pairs of them, as words.
template <class U, class V>
KGEN_FN void put_words(typename U::Word* to, const V (&numbers)[U::elements]) {
  if constexpr (U::elements == 1) {
    store(to, numbers[0], Full<word_lanes<U>>{});
  } else {
#if KGEN_BF16_DOT
    const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)numbers[1].r[0], (__m512)numbers[0].r[0]);
    __builtin_memcpy(to, &pairs, sizeof(pairs));
#endif
  }
}

// Calls `work` of what a thread keeps for all that it does, with its batch `b` and its rows from `begin` to `end`: runs of blocks.
template <class Thread, class Work>
void share_rows(int threads, int64_t batches, int64_t rows, int64_t block, const Work& work) {
  const int64_t down = ceil_div(rows, block), wanted = 4 * int64_t(threads);
  const int64_t shares = threads > 1 ? smaller(down, ceil_div(wanted, batches)) : 1, each = ceil_div(down, shares);
  parallel_team(threads, [&] {
    Thread own = {};
    team_share(batches * ceil_div(down, each), [&](int64_t task) {
      const int64_t first = task % ceil_div(down, each) * each;
      own.b = task / ceil_div(down, each);
      own.begin = first * block;
      own.end = smaller(rows, (first + each) * block);
      work(own);
    });
  });
}

inline bool is_empty(KeySpan span) { return span.begin >= span.end; }

// The part of a block of columns that rows look at, from the first column of a panel on.
template <class U>
KeySpan within(KeySpan block, KeySpan wanted) {
  return {larger(block.begin, wanted.begin / kPanel<U> * kPanel<U>), smaller(block.end, wanted.end)};
}

template <class U>
class AttentionRun {
  using Word = typename U::Word;
  using Acc = typename U::Acc;
  static constexpr int L = word_lanes<U>, E = U::elements;
  static constexpr int64_t P = kPanel<U>, depth = kDepth<U> * E;
  // Rows whose scores stay in L1 from the first matmul to the second one.
  static constexpr int64_t kStrip = 2 * kRows<U>;
  using V = Vec<Acc, L>;
  using Group = Register<Acc, 4>;
  static constexpr Acc lowest = -std::numeric_limits<Acc>::infinity();

 public:
  explicit AttentionRun(const Attention<U>& all) : all_(all), shape_(all.shape) {
    rows_ = round_up(smaller(all.how.m, shape_.m), kStrip);
    block_ = smaller(round_up(smaller(all.how.n, depth), P), round_up(larger(shape_.n, int64_t(1)), P));  // also of no columns
    blocks_ = ceil_div(shape_.n, block_);
    depths_ = ceil_div(shape_.d, depth);
    key_panel_ = P * packed_depth<U>(shape_.d);
    value_panel_ = P * packed_depth<U>(block_);
    key_words_ = block_ / P * key_panel_;
    value_words_ = ceil_div(shape_.v, P) * value_panel_;
    const bool again = shape_.m > all.how.m;
    kept_ = blocks_ == 1 || (again && blocks_ * (key_words_ + value_words_) * int64_t(sizeof(Word)) <= kKeptBytes);
    score_ld_ = block_ + 64 / sizeof(Acc);  // rows a power of two apart would push each other out of L1
    result_ld_ = round_up(shape_.v, P) + 64 / sizeof(Acc);
  }

  // Tasks are runs of blocks of rows: each thread packs the keys of what it computes.
  void run(int threads) {
    share_rows<Thread>(threads, shape_.b, shape_.m, all_.how.m, [&](Thread& own) {
      own.run = this;
      all_.open(all_.self, own.b, &own, [](void* self, const AttentionOperands<U>& operands) {
        auto* const thread = static_cast<Thread*>(self);
        thread->run->rows_of(*thread, operands);
      });
    });
  }

 private:
  // Of a thread: what it computes now, which keys are packed, and its memory.
  struct Thread {
    AttentionRun* run;
    int64_t b, begin, end;
    bool any;
    int64_t packed_b;
    const void *packed_keys, *packed_values;
    Word *queries, *keys, *values, *weights;
    Acc *scores, *results;
    Acc *top, *total;  // of each row: the maximum so far, and the sum of its weights
    char *packed, *started;  // blocks of keys that are packed; strips of rows that have results
    void* room;
  };
  // Rows of a strip, r the first one's place in its block and m its number.
  struct Strip {
    int64_t r, m, rows;
  };

  int64_t room_of_operands(const AttentionOperands<U>& operands) const {
    const int64_t packing = larger(operands.keys.room(P, depth), operands.values.room(P, block_));
    const int64_t few = larger(operands.keys.room(kFilledDots, shape_.d), operands.values.room(shape_.v, block_));
    return larger(operands.queries.room(kRows<U>, larger(depth, shape_.d)), larger(packing, few));
  }

  // The thread's memory: all of it is at one place for as long as the thread runs.
  void place(Thread& own, const AttentionOperands<U>& operands) const {
    const int64_t kept = kept_ ? blocks_ : 1, query_words = rows_ * larger(kDepth<U> * depths_, packed_depth<U>(shape_.d));
    const int64_t bytes = Rooms::bytes<Word>(query_words) + Rooms::bytes<Word>(key_words_ * kept) +
                          Rooms::bytes<Word>(value_words_ * kept) + Rooms::bytes<Word>(kStrip * kDepth<U>) +
                          Rooms::bytes<Acc>(kStrip * score_ld_) + Rooms::bytes<Acc>(rows_ * result_ld_) +
                          2 * Rooms::bytes<Acc>(rows_ + L) + 2 * Rooms::bytes<char>(blocks_ + rows_) + room_of_operands(operands);
    Rooms from(scratch<1>(bytes));
    own.queries = from.template take<Word>(query_words);
    own.keys = from.template take<Word>(key_words_ * kept);
    own.values = from.template take<Word>(value_words_ * kept);
    own.weights = from.template take<Word>(kStrip * kDepth<U>);
    own.scores = from.template take<Acc>(kStrip * score_ld_);
    own.results = from.template take<Acc>(rows_ * result_ld_);
    own.top = from.template take<Acc>(rows_ + L);
    own.total = from.template take<Acc>(rows_ + L);
    own.packed = from.template take<char>(blocks_);
    own.started = from.template take<char>(rows_);
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
    if (own.scores == nullptr) {
      place(own, operands);
      // padding is multiplied as well, and some of what memory may hold is slow
      for (int64_t i = 0; i < kStrip * kDepth<U>; ++i) own.weights[i] = Word(0);
      for (int64_t i = 0; i < kStrip * score_ld_; ++i) own.scores[i] = Acc(0);
    }
    if (!is_packed(own, operands)) {
      for (int64_t i = 0; i < blocks_; ++i) own.packed[i] = 0;
    }
    own.any = true;
    own.packed_b = own.b;
    own.packed_keys = operands.keys_place;
    own.packed_values = operands.values_place;
    for (int64_t m = own.begin; m < own.end; m += all_.how.m) some_rows(own, operands, m, smaller(all_.how.m, own.end - m));
  }

  void some_rows(const Thread& own, const AttentionOperands<U>& operands, int64_t m, int64_t rows) const {
    const bool few = rows <= kFewQueries && operands.takes_few_rows();
    for (int64_t i = 0; i < rows_; ++i) {
      own.top[i] = lowest;
      own.total[i] = Acc(0);
      own.started[i] = 0;
    }
    few ? pack_few(own, operands, m, rows) : pack_queries(own, operands, m, rows);
    for (int64_t i = 0; i < blocks_; ++i) {
      if (is_empty(span_of(own.b, m, rows, i * block_))) continue;
      pack_unless(few, own, operands, i);
      for (int64_t r = 0; r < rows; r += kStrip) {
        const Strip strip{r, m + r, smaller(kStrip, rows - r)};
        add_keys(few, own, operands, strip, i, span_of(own.b, strip.m, strip.rows, i * block_));
      }
    }
    if (all_.fill != kNoFill) add_filled(few, own, operands, m, rows);
    for (int64_t r = 0; r < rows; r += kStrip) finish(own, {r, m + r, smaller(kStrip, rows - r)});
    if (all_.rows != nullptr) {
      log_sum_exp(own, rows);
      all_.rows(all_.self, own.b, m, rows, own.top);
    }
    for (int64_t v = 0; v < shape_.v; v += all_.how.v) {
      all_.store(all_.self, own.b, m, v, rows, smaller(all_.how.v, shape_.v - v), own.results + v, result_ld_);
    }
  }

  void pack_unless(bool few, const Thread& own, const AttentionOperands<U>& operands, int64_t i) const {
    if (few || (kept_ && own.packed[i])) return;
    pack_block(own, operands, i);
    own.packed[i] = 1;
  }

  void add_keys(bool few, const Thread& own, const AttentionOperands<U>& operands, Strip strip, int64_t i, KeySpan span) const {
    if (is_empty(span)) return;
    few ? few_rows(own, operands, strip, span) : many_rows(own, strip, i, span);
  }

  // The keys of which all scores are `fill`, for strips in which such a weight is not 0 in some row.
  void add_filled(bool few, const Thread& own, const AttentionOperands<U>& operands, int64_t m, int64_t rows) const {
    for (int64_t r = 0; r < rows; r += kStrip) {
      const Strip strip{r, m + r, smaller(kStrip, rows - r)};
      if (fill_vanishes(own, strip)) continue;
      for (int64_t i = 0; i < blocks_; ++i) {
        const KeySpan block{i * block_, smaller((i + 1) * block_, shape_.n)};
        KeySpan seen = span_of(own.b, strip.m, strip.rows, block.begin);
        if (is_empty(seen)) seen = {block.end, block.end};
        if (seen.begin == block.begin && seen.end == block.end) continue;
        pack_unless(few, own, operands, i);
        add_keys(few, own, operands, strip, i, {block.begin, seen.begin});
        add_keys(few, own, operands, strip, i, {seen.end, block.end});
      }
    }
  }

  // Whether scores of `fill` have weights of 0: none of them is a row's maximum. Of what is no number they do not.
  bool fill_vanishes(const Thread& own, Strip strip) const {
    bool found = true;
    const V fill = splat<L>(Acc(all_.fill));
    vector_loop<L>(0, strip.rows, [&](int64_t r, auto w) KGEN_INLINE {
      const V top = load<L>(own.top + strip.r + r, w), weight = weight_of(sub_(fill, top));
      found = found && !fold_any(and_(not_(and_(lt_(fill, top), eq_(weight, splat<L>(Acc(0))))), w.mask()));
    });
    return found;
  }

  // The keys that rows look at in the block that begins with key n, from the first one of a panel on; of none, the end is first.
  // Where all rows may look at others later, it ends with a panel as well.
  KeySpan span_of(int64_t b, int64_t m, int64_t rows, int64_t n) const {
    const KeySpan block{n, smaller(n + block_, shape_.n)};
    if (all_.reach == nullptr) return block;
    const KeySpan found = within<U>(block, all_.reach(all_.self, b, m, rows));
    if (all_.fill == kNoFill || is_empty(found)) return found;
    return {found.begin, smaller(n + round_up(found.end - n, P), block.end)};
  }

  // ---- many rows ------------------------------------------------------------------------------------------------------

  // A panel at a time: what is computed of its rows needs room.
  void pack_queries(const Thread& own, const AttentionOperands<U>& operands, int64_t m, int64_t rows) const {
    const int64_t padded = round_up(rows, U::row_step);
    for (int64_t d = 0; d < depths_; ++d) {
      Word* const to = own.queries + d * rows_ * kDepth<U>;
      for (int64_t r = 0; r < padded; r += kRows<U>) {
        const int64_t count = panel_rows<U>(padded - r);
        const Block block{m + r, smaller(count, rows - r), d * depth, smaller(depth, shape_.d - d * depth)};
        operands.queries.pack_row_panels(operands.queries.self, block, count, {kRows<U>, kDepth<U>}, to + r * kDepth<U>, own.room);
      }
    }
  }

  Word* keys_of(const Thread& own, int64_t i) const { return own.keys + (kept_ ? i * key_words_ : 0); }
  Word* values_of(const Thread& own, int64_t i) const { return own.values + (kept_ ? i * value_words_ : 0); }

  void pack_block(const Thread& own, const AttentionOperands<U>& operands, int64_t i) const {
    const int64_t n = i * block_, count = smaller(block_, shape_.n - n);
    for (int64_t j = 0; j < count; j += P) {
      for (int64_t d = 0; d < shape_.d; d += depth) {
        const Block block{n + j, smaller(P, count - j), d, smaller(depth, shape_.d - d)};
        operands.keys.pack_panels(operands.keys.self, block, keys_of(own, i) + j / P * key_panel_ + d / E * P, own.room);
      }
    }
    for (int64_t v = 0; v < shape_.v; v += P) {
      const Block block{v, smaller(P, shape_.v - v), n, count};
      operands.values.pack_panels(operands.values.self, block, values_of(own, i) + v / P * value_panel_, own.room);
    }
  }

  void many_rows(const Thread& own, Strip strip, int64_t i, KeySpan span) const {
    const int64_t padded = round_up(strip.rows, U::row_step), begin = span.begin - i * block_, count = span.end - span.begin;
    const Word* const keys = keys_of(own, i) + begin / P * key_panel_;
    for (int64_t j = 0; j < count; j += P) {
      for (int64_t d = 0; d < depths_; ++d) {
        const int64_t words = words_of<U>(smaller(depth, shape_.d - d * depth));
        multiply_panel<U>(own.queries + (d * rows_ + strip.r) * kDepth<U>, keys + j / P * key_panel_ + d * kDepth<U> * P, words,
                          own.scores + j, score_ld_, padded, d == 0);
      }
    }
    const bool first = !own.started[strip.r];
    if (!weigh<true>(own, strip, span, first)) return;
    own.started[strip.r] = 1;
    const Word* const values = values_of(own, i) + begin / E * P;
    Acc* const results = own.results + strip.r * result_ld_;
    for (int64_t v = 0; v < shape_.v; v += P) {
      multiply_panel<U>(own.weights, values + v / P * value_panel_, words_of<U>(count), results + v, result_ld_, padded, first);
    }
  }

  // ---- a few rows -----------------------------------------------------------------------------------------------------

  void pack_few(const Thread& own, const AttentionOperands<U>& operands, int64_t m, int64_t rows) const {
    const int64_t words = packed_depth<U>(shape_.d);
    operands.queries.pack_row_panels(operands.queries.self, {m, rows, 0, shape_.d}, rows, {1, words}, own.queries, own.room);
  }

  void few_rows(const Thread& own, const AttentionOperands<U>& operands, Strip strip, KeySpan span) const {
    const int64_t count = span.end - span.begin;
    operands.dots(operands.keys.self, {span.begin, count, 0, shape_.d}, own.queries, packed_depth<U>(shape_.d), strip.rows, own.scores,
                  score_ld_, own.room);
    const bool first = !own.started[strip.r];
    if (!weigh<false>(own, strip, span, first)) return;
    own.started[strip.r] = 1;
    for (int64_t i = 0; first && i < strip.rows * result_ld_; ++i) own.results[i] = Acc(0);
    operands.add_weighted(operands.values.self, span.begin, count, shape_.v, own.scores, score_ld_, strip.rows, own.results,
                          result_ld_, own.room);
  }

  // ---- softmax --------------------------------------------------------------------------------------------------------

  // Makes weights of a strip's scores: packed as rows of the next matmul, or (a few rows) in their place. What there is of
  // results shrinks where the maximum has grown. Says whether there are weights but zeros: those of masked keys need no matmul,
  // wherever the mask comes from.
  template <bool Packed>
  bool weigh(const Thread& own, Strip strip, KeySpan span, bool first) const {
    const int64_t count = span.end - span.begin, padded = round_up(strip.rows, U::row_step);
    if (all_.score != nullptr) all_.score(all_.self, own.b, strip.m, span.begin, strip.rows, count, own.scores, score_ld_);
    alignas(64) Acc shift[kStrip + L], kept[kStrip + L];
    for (int64_t r = 0; r < strip.rows; r += 4) find_maxima(own.scores + r * score_ld_, count, shift + r);
    const bool vanish = shift_and_keep(own.top + strip.r, strip.rows, shift, kept);
    if (vanish && all_numbers(own.scores, strip.rows, count)) return false;
    for (int64_t r = 0; r < strip.rows; r += 4) {
      V sums[4] = {};
      for (int64_t j = 0; j < smaller<int64_t>(4, padded - r); ++j) {
        Acc* const row = own.scores + (r + j) * score_ld_;
        if constexpr (Packed) sums[j] = pack_weights(row, count, shift[r + j], weights_of(own, r + j, padded));
        else sums[j] = keep_weights(row, count, shift[r + j]);
      }
      add_to_totals(sums, kept + r, own.total + strip.r + r);
    }
    for (int64_t r = 0; !first && r < strip.rows; ++r) {
      if (kept[r] != Acc(1)) scale(own.results + (strip.r + r) * result_ld_, kept[r]);
    }
    return true;
  }

  // The larger of both; the second where one is no number. A row with a score that is none has such a weight, and so no result.
  KGEN_FN static V higher(V score, V top) {
    return lanewise([](auto x, auto y) KGEN_INLINE { return max_or_second(x, y); }, score, top);
  }

  // The maxima of `count` scores of each of four rows.
  KGEN_FN void find_maxima(const Acc* scores, int64_t count, Acc* to) const {
    V high[4];
    KGEN_UNROLL for (int j = 0; j < 4; ++j) high[j] = splat<L>(lowest);
    vector_loop<L>(0, count, [&](int64_t n, auto w) KGEN_INLINE {
      KGEN_UNROLL for (int j = 0; j < 4; ++j) {
        const V score = load<L>(scores + j * score_ld_ + n, w);
        if constexpr (w.full) high[j] = higher(score, high[j]);
        else high[j] = where_(w.mask(), higher(score, high[j]), high[j]);
      }
    });
    const auto four = folded(high, [](auto x, auto y) KGEN_INLINE { return max_or_second(x, y); });
    __builtin_memcpy(to, &four, sizeof(four));
  }

  template <class F>
  KGEN_FN static Group folded(const V (&rows)[4], F f) {
    if constexpr (V::K == 1) {
      return fold_four_by(f, rows[0].r[0], rows[1].r[0], rows[2].r[0], rows[3].r[0], lane_numbers<L>{});
    } else {
      Group out;
      KGEN_UNROLL for (int j = 0; j < 4; ++j) out[j] = fold_lanes([&](auto x, auto y) KGEN_INLINE { return f(x, y); }, rows[j]);
      return out;
    }
  }

  KGEN_FN static V weight_of(V score) {
    if constexpr (std::is_same_v<Acc, float>) {
      return map_registers<V>([](auto r) KGEN_INLINE { return exp_of_negative_register(r); }, score);
    } else {
      return exp_(score);
    }
  }

  bool all_numbers(const Acc* scores, int64_t rows, int64_t count) const {
    bool found = true;
    for (int64_t r = 0; r < rows; ++r) {
      vector_loop<L>(0, count, [&](int64_t n, auto w) KGEN_INLINE {
        const V score = load<L>(scores + r * score_ld_ + n, w);
        found = found && !fold_any(and_(isnan_(score), w.mask()));
      });
    }
    return found;
  }

  // From the maxima of new scores (in `shift`) what these are shifted by, and the part that is kept of what there is. A row that
  // is -inf so far has none. Says whether all new weights will be zero.
  KGEN_FN static bool shift_and_keep(Acc* top, int64_t rows, Acc* shift, Acc* kept) {
    bool vanish = true;
    vector_loop<L>(0, rows, [&](int64_t r, auto w) KGEN_INLINE {
      const V before = load<L>(top + r, w), own = load<L>(shift + r, w), now = higher(own, before);
      const V by = where_(eq_(now, splat<L>(lowest)), splat<L>(Acc(0)), now);
      vanish = vanish && !fold_any(and_(ne_(weight_of(sub_(own, by)), splat<L>(Acc(0))), w.mask()));
      store(top + r, now, w);
      store(shift + r, by, w);
      store(kept + r, weight_of(sub_(before, by)), w);
    });
    return vanish;
  }

  KGEN_FN static void add_to_totals(const V (&sums)[4], const Acc* kept, Acc* total) {
    const Group more = folded(sums, [](auto x, auto y) KGEN_INLINE { return x + y; });
    for (int j = 0; j < 4; ++j) total[j] = total[j] * kept[j] + more[j];
  }

  WeightRow<Word> weights_of(const Thread& own, int64_t r, int64_t padded) const {
    const int64_t first = r / kRows<U> * kRows<U>;
    return {own.weights + first * kDepth<U> + (r - first) * L, panel_rows<U>(padded - first) * L};
  }

  // Writes words of whole instructions, zeros behind the last key; gives sums.
  KGEN_FN static V pack_weights(const Acc* scores, int64_t count, Acc shift, WeightRow<Word> row) {
    V sums[E] = {};
    const auto words = [&](auto weight) KGEN_INLINE {
      V weights[E];
      KGEN_UNROLL for (int e = 0; e < E; ++e) {
        weights[e] = weight(e);
        sums[e] = add_(sums[e], weights[e]);
      }
      put_words<U>(row.to, weights);
    };
    int64_t n = 0;
    for (; n + E * L <= count; n += E * L, row.to += row.step) {
      words([&](int e) KGEN_INLINE { return weight_of(sub_(load<L>(scores + n + e * L, Full<L>{}), splat<L>(shift))); });
    }
    if (n < count) {
      words([&](int e) KGEN_INLINE {
        const int64_t left = count - n - e * L;
        if (left >= L) return weight_of(sub_(load<L>(scores + n + e * L, Full<L>{}), splat<L>(shift)));
        if (left <= 0) return splat<L>(Acc(0));
        const Tail<L> w{left};
        return where_(w.mask(), weight_of(sub_(load<L>(scores + n + e * L, w), splat<L>(shift))), splat<L>(Acc(0)));
      });
    }
    if constexpr (E == 1) return sums[0];
    else return add_(sums[0], sums[1]);
  }

  KGEN_FN static V keep_weights(Acc* scores, int64_t count, Acc shift) {
    V sum = {};
    vector_loop<L>(0, count, [&](int64_t n, auto w) KGEN_INLINE {
      const V weights = weight_of(sub_(load<L>(scores + n, w), splat<L>(shift)));
      store(scores + n, weights, w);
      sum = step_sum(sum, weights, w);
    });
    return sum;
  }

  void scale(Acc* row, Acc by) const {
    vector_loop<L>(0, shape_.v, [&](int64_t v, auto w) KGEN_INLINE { store(row + v, mul_(load<L>(row + v, w), splat<L>(by)), w); });
  }

  // Divides by the sums of weights. Where every key is left out there are no results yet.
  void finish(const Thread& own, Strip strip) const {
    for (int64_t r = strip.r; r < strip.r + strip.rows; ++r) {
      Acc* const row = own.results + r * result_ld_;
      const bool empty = own.top[r] == lowest && own.total[r] == Acc(0);
      if (!own.started[strip.r] || (empty && all_.safe)) {
        const Acc value = all_.safe ? Acc(0) : std::numeric_limits<Acc>::quiet_NaN();
        for (int64_t v = 0; v < shape_.v; ++v) row[v] = value;
      } else {
        scale(row, Acc(1) / own.total[r]);
      }
    }
  }

  // Replaces the rows' maxima: a row that is -inf as a whole has no weights, and -inf for its log-sum-exp.
  static void log_sum_exp(const Thread& own, int64_t rows) {
    vector_loop<L>(0, rows, [&](int64_t r, auto w) KGEN_INLINE {
      store(own.top + r, add_(load<L>(own.top + r, w), log_(load<L>(own.total + r, w))), w);
    });
  }

  const Attention<U>& all_;
  AttentionShape shape_;
  int64_t rows_, block_, blocks_, depths_, key_panel_, value_panel_, key_words_, value_words_, score_ld_, result_ld_;
  bool kept_;
};

template <class U>
[[gnu::noinline]] void attend(int threads, const Attention<U>& all) {
  if (all.shape.b <= 0 || all.shape.m <= 0 || (all.shape.v <= 0 && all.rows == nullptr)) return;
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
template <class S>
KGEN_FN const void* place_of(const S& from) {
  if constexpr (S::in_place) return from.data;
  else return nullptr;
}

// How generated code's functions are called.
template <class U, class Open, class Score, class Reach, class Rows, class Store>
struct AttentionFunctions {
  using Acc = typename U::Acc;
  const Open& open;
  const Score& score;
  const Reach& reach;
  const Rows& rows;
  const Store& store;

  static const AttentionFunctions& of(const void* self) { return *static_cast<const AttentionFunctions*>(self); }
  static void opened(const void* self, int64_t b, void* run, typename Attention<U>::Then then) {
    of(self).open(b, [&](const auto& queries, const auto& keys, const auto& values) KGEN_INLINE {
      using S = std::decay_t<decltype(values)>;
      const Exchanged<S> columns{values};
      then(run, {packed_operand_of<U>(queries), packed_operand_of<U>(keys), packed_operand_of<U>(columns), place_of(keys),
                 place_of(values), values.along_k(), dots<std::decay_t<decltype(keys)>>, weighted<S>});
    });
  }
  template <class S>
  static void dots(const void* keys, Block block, const typename U::Word* x, int64_t words, int64_t rows, Acc* c, int64_t ldc,
                   void* room) {
    const int64_t at_once = S::in_place ? block.ni : kFilledDots;
    for (int64_t i = 0; i < block.ni; i += at_once) {
      const Block some{block.i + i, smaller(at_once, block.ni - i), block.k, block.nk};
      dot_few(x, words, rows, OperandFunctions<U, S>::words(keys, some, room), c + i, ldc);
    }
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
  static KeySpan reached(const void* self, int64_t b, int64_t m0, int64_t rows) {
    if constexpr (!std::is_null_pointer_v<Reach>) return of(self).reach(b, m0, rows);
    else return {0, 0};
  }
  static void summed(const void* self, int64_t b, int64_t m0, int64_t rows, const Acc* lse) {
    if constexpr (!std::is_null_pointer_v<Rows>) of(self).rows(b, m0, rows, lse);
  }
  static void stored(const void* self, int64_t b, int64_t m0, int64_t v0, int64_t rows, int64_t columns, const Acc* tile, int64_t ld) {
    of(self).store(b, m0, v0, rows, columns, tile, ld);
  }
};

// Attention of queries and keys of element types A and B, see the head of this file.
template <class A, class B, class Open, class Score, class Reach, class Rows, class Store>
KGEN_FN void attention(int threads, const AttentionShape& shape, const AttentionBlocks& how, bool safe, const Open& open,
                       const Score& score, const Reach& reach, double fill, const Rows& rows, const Store& store) {
  using U = unit_t<A, B>;
  using F = AttentionFunctions<U, Open, Score, Reach, Rows, Store>;
  const F functions{open, score, reach, rows, store};
  attend<U>(threads, {shape, how, safe, &functions, F::opened, std::is_null_pointer_v<Score> ? nullptr : F::scored,
                      std::is_null_pointer_v<Reach> ? nullptr : F::reached, fill, std::is_null_pointer_v<Rows> ? nullptr : F::summed,
                      F::stored});
}

}  // namespace kgen

// As KGEN_MATMUL, of attention.
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
  how template void dot_few(const unit_t<A, B>::Word*, int64_t, int64_t, Words<unit_t<A, B>, B>, unit_t<A, B>::Acc*, int64_t); \
  how template void add_weighted(Strided<B>, int64_t, int64_t, const unit_t<A, B>::Acc*, int64_t, int64_t, unit_t<A, B>::Acc*, \
                                 int64_t);                                                                                     \
  }
