// Gradients of attention: scores of rows and columns, computed again, any function of them, times a last operand. With two pairs
// of operands there are two scores of each row and column, as where the gradient of a weight is needed as well. A block of scores
// is in a thread's cache, and no other score is anywhere. Each result is one thread's sum, in the order of the columns.
//
//   const auto open = [&](int64_t b, const auto& use) { use(last, left, right, left1, right1); };   // operands (pack.h) of one batch
//   const auto score = [&](int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns, float* tile, float* tile1, int64_t ld) {...};
//   const auto store = [&](int64_t b, int64_t m0, int64_t e0, int64_t rows, int64_t columns, const float* tile, int64_t ld) {...};
//   attention_backward<bfloat16, bfloat16>(threads, {B, M, N, E, D, V}, {.m = 96, .n = 128, .v = 64}, open, score, nullptr, nullptr, store);
//
// Element (n, e) of the last operand is operand element (i, k) = (n, e), as for the right ones. `score` makes of both tiles what is
// multiplied by the last operand, in place of the first one; without a second pair `use` has three operands, and `tile1` is null.
// `reach(b, m0, rows)` may say which columns these rows need to look at, as a KeySpan: for others `score` gives 0.
// `holds(b, m0, rows)`, unless it is nullptr, says whether that is so: else these rows look at all columns.
//
// Sums of scores themselves, with two pairs of operands in front of which `open` has any one:
//
//   added_scores<float, float>(threads, {B, M, N, 0, D, V}, how, R, open, score, nullptr, nullptr, store);      // over R batches each
//   scores_by_entry<float, float>(threads, {B, M, N, C, D, V}, how, open, score, nullptr, nullptr, add, store);
//
// The first function's `open`, `score`, `reach` and `holds` get the number of a batch among all B * R, those of one result one behind
// the other; `store` gets tiles of sums. The second one's `add(b, m0, n0, rows, columns, tile, ld, sums)` adds a tile to the C sums of
// a batch, and `store(b, 0, 0, 1, C, sums, C)` gets these. They are added up block by block.
#pragma once

#include "attention.h"

namespace kgen {

// `d` and `v`: elements of a row of each pair; v < 0: there is no second pair. `sums`: the last operand is 1, and e is 1: scores are
// added up as they are.
struct RecomputedShape {
  int64_t b, m, n, e, d, v;
  bool sums = false;
};

// The operands of one batch. `data`: addresses of memory, as AttentionOperands has them, of the right operands, and of the last one.
template <class U>
struct RecomputedOperands {
  Operand<U> last, left[2], right[2];
  const void* data[3];
};

// What is computed, its types hidden: all kernels of a unit share the loops.
template <class U>
struct Recomputed {
  using Acc = typename U::Acc;
  using Then = void (*)(void* run, const RecomputedOperands<U>& operands);
  RecomputedShape shape;
  AttentionBlocks how;
  const void* self;
  void (*open)(const void* self, int64_t b, void* run, Then then);
  void (*score)(const void* self, int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns, Acc* tile, Acc* tile1, int64_t ld);
  KeySpan (*reach)(const void* self, int64_t b, int64_t m0, int64_t rows);
  bool (*holds)(const void* self, int64_t b, int64_t m0, int64_t rows);
  void (*store)(const void* self, int64_t b, int64_t m0, int64_t e0, int64_t rows, int64_t columns, const Acc* tile, int64_t ld);
  // of sums of scores: batches that are added up, 0 where nothing is stored but what `add` makes of tiles; of others -1
  int64_t added = -1;
  void (*add)(const void* self, int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns, const Acc* tile, int64_t ld,
              Acc* sums) = nullptr;
};

template <class U>
class RecomputedRun {
 protected:
  using Word = typename U::Word;
  using Acc = typename U::Acc;
  static constexpr int L = word_lanes<U>, E = U::elements;
  static constexpr int64_t P = kPanel<U>, depth = kDepth<U> * E;
  // Rows whose scores stay in L1 from one matmul to the next one.
  static constexpr int64_t kStrip = 2 * kRows<U>;
  using V = Vec<Acc, L>;

 public:
  explicit RecomputedRun(const Recomputed<U>& all) : all_(all), shape_(all.shape), pairs_(all.shape.v < 0 ? 1 : 2) {
    rows_ = round_up(smaller(all.how.m, shape_.m), kStrip);
    block_ = smaller(round_up(smaller(all.how.n, depth), P), round_up(larger(shape_.n, int64_t(1)), P));  // also of no columns
    blocks_ = ceil_div(shape_.n, block_);
    depths_[0] = shape_.d;
    depths_[1] = larger(shape_.v, int64_t(0));
    last_panel_ = P * packed_depth<U>(block_);
    columns_words_ = ceil_div(shape_.e, P) * last_panel_;
    for (int p = 0; p < pairs_; ++p) {
      right_at_[p] = columns_words_;
      columns_words_ += block_ / P * panel(p);
    }
    const bool again = shape_.m > all.how.m;
    kept_ = blocks_ == 1 || (again && blocks_ * columns_words_ * int64_t(sizeof(Word)) <= kKeptBytes);
    score_ld_ = block_ + 64 / sizeof(Acc);  // rows a power of two apart would push each other out of L1
    result_ld_ = round_up(shape_.e, P) + 64 / sizeof(Acc);
  }

  // Tasks are runs of blocks of rows: each thread packs the columns of what it computes.
  void run(int threads) {
    share_rows<Thread>(threads, shape_.b, shape_.m, all_.how.m, [&](Thread& own) {
      own.run = this;
      all_.open(all_.self, own.b, &own, [](void* self, const RecomputedOperands<U>& operands) {
        auto* const thread = static_cast<Thread*>(self);
        thread->run->rows_of(*thread, operands);
      });
    });
  }

 protected:
  // Of a thread: what it computes now, which columns are packed, and its memory.
  struct Thread {
    RecomputedRun* run;
    int64_t b, begin, end;
    bool any, everywhere;  // everywhere: its rows look at all columns
    int64_t packed_b;
    const void* packed_data[3];
    Word *left[2], *columns, *made;
    Acc *scores[2], *results;
    char *packed, *started;  // blocks of columns that are packed; strips of rows that have results
    void* room;
  };
  // Rows of a strip, r the first one's place in its block and m its number.
  struct Strip {
    int64_t r, m, rows;
  };

  // Words of a packed panel of a right operand.
  int64_t panel(int p) const { return P * packed_depth<U>(depths_[p]); }
  int64_t left_words(int p) const { return rows_ * kDepth<U> * ceil_div(depths_[p], depth); }

  int64_t room_of_operands(const RecomputedOperands<U>& operands) const {
    int64_t bytes = operands.last.room(P, block_);
    for (int p = 0; p < pairs_; ++p) {
      bytes = larger(bytes, larger(operands.left[p].room(kRows<U>, depth), operands.right[p].room(P, depth)));
    }
    return bytes;
  }

  // The thread's memory: all of it is at one place for as long as the thread runs.
  void place(Thread& own, const RecomputedOperands<U>& operands) const {
    const int64_t kept = kept_ ? blocks_ : 1;
    int64_t bytes = Rooms::bytes<Word>(columns_words_ * kept) + Rooms::bytes<Word>(kStrip * kDepth<U>) +
                    Rooms::bytes<Acc>(rows_ * result_ld_) + 2 * Rooms::bytes<char>(blocks_ + rows_) + room_of_operands(operands);
    for (int p = 0; p < pairs_; ++p) bytes += Rooms::bytes<Word>(left_words(p)) + Rooms::bytes<Acc>(kStrip * score_ld_);
    Rooms from(scratch<1>(bytes));
    for (int p = 0; p < pairs_; ++p) {
      own.left[p] = from.template take<Word>(left_words(p));
      own.scores[p] = from.template take<Acc>(kStrip * score_ld_);
    }
    own.columns = from.template take<Word>(columns_words_ * kept);
    own.made = from.template take<Word>(kStrip * kDepth<U>);
    own.results = from.template take<Acc>(rows_ * result_ld_);
    own.packed = from.template take<char>(blocks_);
    own.started = from.template take<char>(rows_);
    own.room = from.template take<char>(0);
    // padding is multiplied as well, and some of what memory may hold is slow
    for (int64_t i = 0; i < kStrip * kDepth<U>; ++i) own.made[i] = Word(0);
    for (int p = 0; p < pairs_; ++p) {
      for (int64_t i = 0; i < kStrip * score_ld_; ++i) own.scores[p][i] = Acc(0);
    }
  }

  // Whether the packed columns are those of this batch.
  bool is_packed(const Thread& own, const RecomputedOperands<U>& operands) const {
    if (!own.any) return false;
    bool same = true;
    for (int p = 0; p < 3; ++p) {
      const bool needed = p < pairs_ || p == 2;
      same = same && (!needed || (operands.data[p] != nullptr && operands.data[p] == own.packed_data[p]));
    }
    return own.packed_b == own.b || same;
  }

  void rows_of(Thread& own, const RecomputedOperands<U>& operands) const {
    [[maybe_unused]] const tiles_t<U> registers;
    if (own.results == nullptr) place(own, operands);
    if (!is_packed(own, operands)) {
      for (int64_t i = 0; i < blocks_; ++i) own.packed[i] = 0;
    }
    own.any = true;
    own.packed_b = own.b;
    for (int p = 0; p < 3; ++p) own.packed_data[p] = operands.data[p];
    for (int64_t m = own.begin; m < own.end; m += all_.how.m) {
      const int64_t rows = smaller(all_.how.m, own.end - m);
      own.everywhere = all_.reach == nullptr || (all_.holds != nullptr && !all_.holds(all_.self, own.b, m, rows));
      some_rows(own, operands, m, rows);
    }
  }

  void some_rows(const Thread& own, const RecomputedOperands<U>& operands, int64_t m, int64_t rows) const {
    for (int64_t i = 0; i < rows_; ++i) own.started[i] = 0;
    for (int p = 0; p < pairs_; ++p) pack_left(own, operands.left[p], p, m, rows);
    for (int64_t i = 0; i < blocks_; ++i) {
      if (is_empty(span_of(own, m, rows, i * block_))) continue;
      if (!kept_ || !own.packed[i]) {
        pack_block(own, operands, i);
        own.packed[i] = 1;
      }
      for (int64_t r = 0; r < rows; r += kStrip) {
        const Strip strip{r, m + r, smaller(kStrip, rows - r)};
        const KeySpan span = span_of(own, strip.m, strip.rows, i * block_);
        if (!is_empty(span)) add_block(own, strip, i, span);
      }
    }
    clear_rest(own, rows);
    for (int64_t e = 0; e < shape_.e; e += all_.how.v) {
      all_.store(all_.self, own.b, m, e, rows, smaller(all_.how.v, shape_.e - e), own.results + e, result_ld_);
    }
  }

  // The columns that rows look at in the block that begins with column n, from the first one of a panel on.
  KeySpan span_of(const Thread& own, int64_t m, int64_t rows, int64_t n) const {
    const KeySpan block{n, smaller(n + block_, shape_.n)};
    return own.everywhere ? block : within<U>(block, all_.reach(all_.self, own.b, m, rows));
  }

  // A panel at a time: what is computed of its rows needs room.
  void pack_left(const Thread& own, const Operand<U>& left, int p, int64_t m, int64_t rows) const {
    const int64_t padded = round_up(rows, U::row_step);
    for (int64_t d = 0; d < depths_[p]; d += depth) {
      Word* const to = own.left[p] + d / depth * rows_ * kDepth<U>;
      for (int64_t r = 0; r < padded; r += kRows<U>) {
        const int64_t count = panel_rows<U>(padded - r);
        const Block block{m + r, smaller(count, rows - r), d, smaller(depth, depths_[p] - d)};
        left.pack_row_panels(left.self, block, count, {kRows<U>, kDepth<U>}, to + r * kDepth<U>, own.room);
      }
    }
  }

  Word* columns_of(const Thread& own, int64_t i) const { return own.columns + (kept_ ? i * columns_words_ : 0); }

  void pack_block(const Thread& own, const RecomputedOperands<U>& operands, int64_t i) const {
    const int64_t n = i * block_, count = smaller(block_, shape_.n - n);
    for (int p = 0; p < pairs_; ++p) pack_right(own, operands.right[p], p, n, count, columns_of(own, i) + right_at_[p]);
    for (int64_t e = 0; e < shape_.e; e += P) {
      const Block block{e, smaller(P, shape_.e - e), n, count};
      operands.last.pack_panels(operands.last.self, block, columns_of(own, i) + e / P * last_panel_, own.room);
    }
  }

  void pack_right(const Thread& own, const Operand<U>& right, int p, int64_t n, int64_t count, Word* to) const {
    for (int64_t j = 0; j < count; j += P) {
      for (int64_t d = 0; d < depths_[p]; d += depth) {
        const Block block{n + j, smaller(P, count - j), d, smaller(depth, depths_[p] - d)};
        right.pack_panels(right.self, block, to + j / P * panel(p) + d / E * P, own.room);
      }
    }
  }

  void add_block(const Thread& own, Strip strip, int64_t i, KeySpan span) const {
    const int64_t padded = round_up(strip.rows, U::row_step), begin = span.begin - i * block_, count = span.end - span.begin;
    for (int p = 0; p < pairs_; ++p) {
      make_scores(own, strip.r, padded, p, columns_of(own, i) + right_at_[p] + begin / P * panel(p), count);
    }
    all_.score(all_.self, own.b, strip.m, span.begin, strip.rows, count, own.scores[0], own.scores[1], score_ld_);
    const bool first = !own.started[strip.r];
    own.started[strip.r] = 1;
    if (shape_.sums) {
      for (int64_t r = 0; r < strip.rows; ++r) {
        Acc* const result = own.results + (strip.r + r) * result_ld_;
        *result = (first ? Acc(0) : *result) + sum_of(own.scores[0] + r * score_ld_, count);
      }
      return;
    }
    for (int64_t r = 0; r < padded; ++r) pack_made(own.scores[0] + r * score_ld_, count, place_of_row(own, r, padded));
    const Word* const last = columns_of(own, i) + begin / E * P;
    Acc* const results = own.results + strip.r * result_ld_;
    for (int64_t e = 0; e < shape_.e; e += P) {
      multiply_panel<U>(own.made, last + e / P * last_panel_, words_of<U>(count), results + e, result_ld_, padded, first);
    }
  }

  KGEN_FN static Acc sum_of(const Acc* from, int64_t count) {
    V total = splat<L>(Acc(0));
    int64_t n = 0;
    for (; n + L <= count; n += L) total = add_(total, load<L>(from + n, Full<L>{}));
    Acc sum = 0;
    for (; n < count; ++n) sum += from[n];
    KGEN_UNROLL for (int l = 0; l < L; ++l) sum += total[l];
    return sum;
  }

  void make_scores(const Thread& own, int64_t r, int64_t padded, int p, const Word* right, int64_t count) const {
    for (int64_t k = 0; depths_[p] == 0 && k < padded * score_ld_; ++k) own.scores[p][k] = 0;
    for (int64_t j = 0; j < count; j += P) {
      for (int64_t d = 0; d < depths_[p]; d += depth) {
        const Word* const left = own.left[p] + (d / depth * rows_ + r) * kDepth<U>;
        multiply_panel<U>(left, right + j / P * panel(p) + d / E * P, words_of<U>(smaller(depth, depths_[p] - d)),
                          own.scores[p] + j, score_ld_, padded, d == 0);
      }
    }
  }

  WeightRow<Word> place_of_row(const Thread& own, int64_t r, int64_t padded) const {
    const int64_t first = r / kRows<U> * kRows<U>;
    return {own.made + first * kDepth<U> + (r - first) * L, panel_rows<U>(padded - first) * L};
  }

  // Writes words of whole instructions, zeros behind the last column.
  KGEN_FN static void pack_made(const Acc* from, int64_t count, WeightRow<Word> row) {
    const auto words = [&](auto number) KGEN_INLINE {
      V numbers[E];
      KGEN_UNROLL for (int e = 0; e < E; ++e) numbers[e] = number(e);
      put_words<U>(row.to, numbers);
      row.to += row.step;
    };
    int64_t n = 0;
    for (; n + E * L <= count; n += E * L) {
      words([&](int e) KGEN_INLINE { return load<L>(from + n + e * L, Full<L>{}); });
    }
    if (n == count) return;
    words([&](int e) KGEN_INLINE {
      const int64_t left = count - n - e * L;
      if (left >= L) return load<L>(from + n + e * L, Full<L>{});
      if (left <= 0) return splat<L>(Acc(0));
      const Tail<L> w{left};
      return where_(w.mask(), load<L>(from + n + e * L, w), splat<L>(Acc(0)));
    });
  }

  // Rows that look at no column have zeros.
  void clear_rest(const Thread& own, int64_t rows) const {
    for (int64_t r = 0; r < rows; r += kStrip) {
      if (own.started[r]) continue;
      for (int64_t i = 0; i < smaller(kStrip, rows - r) * result_ld_; ++i) own.results[r * result_ld_ + i] = Acc(0);
    }
  }

  const Recomputed<U>& all_;
  RecomputedShape shape_;
  int pairs_;
  int64_t rows_, block_, blocks_, depths_[2], last_panel_, columns_words_, right_at_[2], score_ld_, result_ld_;
  bool kept_;
};

// Sums of scores: no last operand multiplies them.
template <class U>
class SummedRun : RecomputedRun<U> {
  using Base = RecomputedRun<U>;
  using Acc = typename U::Acc;
  using typename Base::Strip;
  using typename Base::Thread;

 public:
  explicit SummedRun(const Recomputed<U>& all) : Base(all) {}

  // Tasks are runs of blocks of rows, which keep a block of sums; or batches, which keep the sums of their entries.
  void run(int threads) {
    const bool by_entry = this->all_.added == 0;
    share_rows<Thread>(threads, this->shape_.b, by_entry ? 1 : this->shape_.m, this->all_.how.m, [&](Thread& own) {
      if (by_entry) entries_of(own);
      else blocks_of(own);
    });
  }

 private:
  // A block of scores of one batch.
  struct Part {
    const SummedRun* run;
    Thread* own;
    int64_t m, rows, i;
  };

  void blocks_of(Thread& own) const {
    const int64_t b = own.b, columns = this->block_;
    for (int64_t m = own.begin; m < own.end; m += this->all_.how.m) {
      const int64_t rows = smaller(this->all_.how.m, own.end - m);
      for (int64_t i = 0; i < this->blocks_; ++i) {
        for (int64_t k = 0; k < this->all_.added; ++k) scores_of(own, b * this->all_.added + k, m, rows, i, k == 0);
        const int64_t n = i * columns;
        this->all_.store(this->all_.self, b, m, n, rows, smaller(columns, this->shape_.n - n), own.results, this->result_ld_);
      }
    }
    own.b = b;
  }

  void entries_of(Thread& own) const {
    bool first = true;
    for (int64_t m = 0; m < this->shape_.m; m += this->all_.how.m) {
      for (int64_t i = 0; i < this->blocks_; ++i, first = false) {
        scores_of(own, own.b, m, smaller(this->all_.how.m, this->shape_.m - m), i, first);
      }
    }
    this->all_.store(this->all_.self, own.b, 0, 0, 1, this->shape_.e, own.results, this->shape_.e);
  }

  // Adds a block of scores of one batch to the sums, which begin with the `first` one.
  void scores_of(Thread& own, int64_t b, int64_t m, int64_t rows, int64_t i, bool first) const {
    own.b = b;
    Part part{this, &own, m, rows, i};
    own.any = first;
    this->all_.open(this->all_.self, b, &part, [](void* self, const RecomputedOperands<U>& operands) {
      const auto& part = *static_cast<const Part*>(self);
      part.run->add_part(part, operands);
    });
  }

  void add_part(const Part& part, const RecomputedOperands<U>& operands) const {
    [[maybe_unused]] const tiles_t<U> registers;
    Thread& own = *part.own;
    if (own.results == nullptr) this->place(own, operands);
    if (own.any) clear(own);
    own.everywhere = this->all_.reach == nullptr ||
                     (this->all_.holds != nullptr && !this->all_.holds(this->all_.self, own.b, part.m, part.rows));
    const int64_t n = part.i * this->block_, count = smaller(this->block_, this->shape_.n - n);
    if (is_empty(this->span_of(own, part.m, part.rows, n))) return;
    for (int p = 0; p < 2; ++p) {
      this->pack_left(own, operands.left[p], p, part.m, part.rows);
      this->pack_right(own, operands.right[p], p, n, count, own.columns + this->right_at_[p]);
    }
    for (int64_t r = 0; r < part.rows; r += Base::kStrip) {
      const Strip strip{r, part.m + r, smaller(Base::kStrip, part.rows - r)};
      const KeySpan span = this->span_of(own, strip.m, strip.rows, n);
      if (!is_empty(span)) add_strip(own, strip, span, n);
    }
  }

  void clear(const Thread& own) const {
    const int64_t count = this->all_.added == 0 ? this->shape_.e : this->rows_ * this->result_ld_;
    for (int64_t i = 0; i < count; ++i) own.results[i] = Acc(0);
  }

  void add_strip(const Thread& own, Strip strip, KeySpan span, int64_t n) const {
    const int64_t padded = round_up(strip.rows, U::row_step), begin = span.begin - n, count = span.end - span.begin;
    for (int p = 0; p < 2; ++p) {
      this->make_scores(own, strip.r, padded, p, own.columns + this->right_at_[p] + begin / Base::P * this->panel(p), count);
    }
    Acc* const scores = own.scores[0];
    this->all_.score(this->all_.self, own.b, strip.m, span.begin, strip.rows, count, scores, own.scores[1], this->score_ld_);
    if (this->all_.added == 0) {
      this->all_.add(this->all_.self, own.b, strip.m, span.begin, strip.rows, count, scores, this->score_ld_, own.results);
      return;
    }
    for (int64_t r = 0; r < strip.rows; ++r) {
      Acc* const to = own.results + (strip.r + r) * this->result_ld_ + begin;
      for (int64_t j = 0; j < count; ++j) to[j] += scores[r * this->score_ld_ + j];
    }
  }
};

template <class U>
[[gnu::noinline]] void attend_backward(int threads, const Recomputed<U>& all) {
  if (all.shape.b <= 0 || all.shape.m <= 0 || all.shape.e <= 0) return;
  const int64_t work = all.shape.b * larger<int64_t>(all.shape.m, 8) * all.shape.n * (all.shape.d + all.shape.v + all.shape.e);
  if (all.added >= 0) SummedRun<U>(all).run(useful_threads(threads, work * larger<int64_t>(all.added, 1)));
  else RecomputedRun<U>(all).run(useful_threads(threads, work));
}

// How generated code's functions are called.
template <class U, class Open, class Score, class Reach, class Holds, class Store>
struct RecomputedFunctions {
  using Acc = typename U::Acc;
  const Open& open;
  const Score& score;
  const Reach& reach;
  const Holds& holds;
  const Store& store;

  static const RecomputedFunctions& of(const void* self) { return *static_cast<const RecomputedFunctions*>(self); }
  static void opened(const void* self, int64_t b, void* run, typename Recomputed<U>::Then then) {
    of(self).open(b, [&](const auto& last, const auto& left, const auto& right, const auto&... more) KGEN_INLINE {
      const Exchanged<std::decay_t<decltype(last)>> columns{last};
      RecomputedOperands<U> operands = {};
      operands.last = packed_operand_of<U>(columns);
      operands.data[2] = place_of(last);
      pair(operands, 0, left, right);
      if constexpr (sizeof...(more) != 0) pair(operands, 1, more...);
      then(run, operands);
    });
  }
  template <class Left, class Right>
  static void pair(RecomputedOperands<U>& operands, int p, const Left& left, const Right& right) {
    operands.left[p] = packed_operand_of<U>(left);
    operands.right[p] = packed_operand_of<U>(right);
    operands.data[p] = place_of(right);
  }
  static void scored(const void* self, int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns, Acc* tile, Acc* tile1,
                     int64_t ld) {
    of(self).score(b, m0, n0, rows, columns, tile, tile1, ld);
  }
  static KeySpan reached(const void* self, int64_t b, int64_t m0, int64_t rows) {
    if constexpr (!std::is_null_pointer_v<Reach>) return of(self).reach(b, m0, rows);
    else return {0, 0};
  }
  static bool asked(const void* self, int64_t b, int64_t m0, int64_t rows) {
    if constexpr (!std::is_null_pointer_v<Holds>) return of(self).holds(b, m0, rows);
    else return true;
  }
  static void stored(const void* self, int64_t b, int64_t m0, int64_t e0, int64_t rows, int64_t columns, const Acc* tile, int64_t ld) {
    of(self).store(b, m0, e0, rows, columns, tile, ld);
  }
};

// Of left and right operands of element types A and B, see the head of this file.
template <class A, class B, class Open, class Score, class Reach, class Holds, class Store>
KGEN_FN void attention_backward(int threads, const RecomputedShape& shape, const AttentionBlocks& how, const Open& open,
                                const Score& score, const Reach& reach, const Holds& holds, const Store& store) {
  using U = unit_t<A, B>;
  using F = RecomputedFunctions<U, Open, Score, Reach, Holds, Store>;
  const F functions{open, score, reach, holds, store};
  attend_backward<U>(threads, {shape, how, &functions, F::opened, F::scored, std::is_null_pointer_v<Reach> ? nullptr : F::reached,
                               std::is_null_pointer_v<Holds> ? nullptr : F::asked, F::stored});
}

// Sums of scores over batches, see the head of this file.
template <class A, class B, class Open, class Score, class Reach, class Holds, class Store>
KGEN_FN void added_scores(int threads, RecomputedShape shape, const AttentionBlocks& how, int64_t batches, const Open& open,
                          const Score& score, const Reach& reach, const Holds& holds, const Store& store) {
  using U = unit_t<A, B>;
  using F = RecomputedFunctions<U, Open, Score, Reach, Holds, Store>;
  const F functions{open, score, reach, holds, store};
  shape.e = how.n;  // columns of a block of sums
  attend_backward<U>(threads, {shape, how, &functions, F::opened, F::scored, std::is_null_pointer_v<Reach> ? nullptr : F::reached,
                               std::is_null_pointer_v<Holds> ? nullptr : F::asked, F::stored, batches});
}

// Functions of sums by entry.
template <class Functions, class Add>
struct AddingFunctions {
  Functions rest;  // the first member: what takes these functions for others finds them
  const Add& add;

  template <class Acc>
  static void added(const void* self, int64_t b, int64_t m0, int64_t n0, int64_t rows, int64_t columns, const Acc* tile, int64_t ld,
                    Acc* sums) {
    static_cast<const AddingFunctions*>(self)->add(b, m0, n0, rows, columns, tile, ld, sums);
  }
};

// Sums of scores by entry, see the head of this file.
template <class A, class B, class Open, class Score, class Reach, class Holds, class Add, class Store>
KGEN_FN void scores_by_entry(int threads, const RecomputedShape& shape, const AttentionBlocks& how, const Open& open,
                             const Score& score, const Reach& reach, const Holds& holds, const Add& add, const Store& store) {
  using U = unit_t<A, B>;
  using F = RecomputedFunctions<U, Open, Score, Reach, Holds, Store>;
  using G = AddingFunctions<F, Add>;
  const G functions{{open, score, reach, holds, store}, add};
  attend_backward<U>(threads, {shape, how, &functions, F::opened, F::scored, std::is_null_pointer_v<Reach> ? nullptr : F::reached,
                               std::is_null_pointer_v<Holds> ? nullptr : F::asked, F::stored, 0, G::template added<typename U::Acc>});
}

}  // namespace kgen

// As KGEN_MATMUL, of gradients of attention.
#ifdef KGEN_OWN_LOOPS
#define KGEN_ATTENTION_BACKWARD(A, B)
#else
#define KGEN_ATTENTION_BACKWARD(A, B)            \
  KGEN_LOOPS_OF_ATTENTION_BACKWARD(extern, A, B) \
  KGEN_LOOPS_OF_PACKING(extern, A, B, A)         \
  KGEN_LOOPS_OF_PACKING(extern, A, B, B)
#endif
// The object with the loops over blocks of scores.
#define KGEN_LOOPS_OF_ATTENTION_BACKWARD(how, A, B)                               \
  namespace kgen {                                                                \
  how template void attend_backward<unit_t<A, B>>(int, const Recomputed<unit_t<A, B>>&); \
  }
