// Convolutions without a matmul: each output is a sum over few taps, and over few channels, in registers. What is convolved and
// what becomes of the results comes from generated code.
//
//   convolve_channels<float>(threads, shape, blocks, shared, image, filter, finish);   // adjacent lanes are channels g
//   convolve_rows<float>(threads, shape, blocks, shared, image, filter, finish);       // ... are positions w along a row
//
// Coordinates of the image are numbered as the taps come to them: coordinate = position * step + tap * dilation, in d, h and w. `image`
// computes a rectangle of coordinates into a thread's memory, once for all taps and outputs there, whatever is fused into it:
// zeros beyond the image, a cast, a normalisation. So no tap asks for a bound. With `shared`, g does not tell images apart.
//
// `finish` gets every result exactly once, after its whole sum, in a rectangle: of positions w by channels g, or of rows h by
// positions w. Sums run over c, q, r and s, in this order.
#pragma once

#include "reduce.h"
#include "team.h"

namespace kgen {

// Steps of positions and dilations of taps along one dimension, and how many there are of either.
struct Window {
  int64_t positions, taps, step, dilation;
  KGEN_FN int64_t coordinate(int64_t position, int64_t tap) const { return position * step + tap * dilation; }
  // Coordinates that `count` adjacent positions come to.
  KGEN_FN int64_t span(int64_t count) const { return (count - 1) * step + (taps - 1) * dilation + 1; }
  KGEN_FN int64_t span() const { return (taps - 1) * dilation + 1; }
};
struct DirectShape {
  int64_t b, g, c;
  Window d, h, w;
};
// Rows, positions of a row and channels of a thread's rectangles.
struct DirectBlocks {
  int64_t h, w, g;
};

// Multiplications that are worth waking a thread for.
inline constexpr int64_t kDirectGrain = 1 << 15;

KGEN_FN int direct_threads(int threads, const DirectShape& s) {
  const int64_t points = s.b * s.g * s.d.positions * s.h.positions * s.w.positions;
  const int64_t useful = ceil_div(points * s.c * s.d.taps * s.h.taps * s.w.taps, kDirectGrain);
  return int(larger<int64_t>(1, smaller<int64_t>(threads, useful)));
}

// What is known of rows when a kernel is compiled: taps, their steps, and elements from one coordinate to the next (0: not known).
template <int Taps_, int Step_, int Dilation_, int Width_>
struct RowTraits {
  static constexpr int Taps = Taps_, Step = Step_, Dilation = Dilation_, Width = Width_;
};

// ---- vectors of channels --------------------------------------------------------------------------------------------

// The filter as [block of g][c][q][r][s][g]: once for all threads.
template <class T, class Acc, class Filter>
void pack_filter(const DirectShape& s, Acc* to, const Filter& filter) {
  for (int64_t g = 0; g < s.g; g += T::Width) {
    for (int64_t c = 0; c < s.c; ++c) {
      for (int64_t q = 0; q < s.d.taps; ++q) {
        for (int64_t r = 0; r < s.h.taps; ++r, to += s.w.taps * T::Width) {
          filter(c, q, r, s.w.taps, g, smaller<int64_t>(T::Width, s.g - g), to, T::Width);
        }
      }
    }
  }
}

// Rows of coordinates, each [w][g], of which the last few are kept: those that one row of results needs. Of channels c and planes q.
template <class Acc>
struct RowRing {
  Acc* data;
  int64_t row, rows;  // elements of a row, and rows of a ring
  KGEN_FN Acc* at(int64_t plane, int64_t coordinate) const { return data + (plane * rows + coordinate % rows) * row; }
};

// sums[i] += x[i * step + t * dilation] * filter[t] over the taps t of a row. What adjacent positions share is loaded once:
// all taps are unrolled.
template <class T, int Count, bool Shared, class Acc, class W>
KGEN_FN void add_taps(Vec<Acc, W::L> (&sums)[Count], const DirectShape& s, const Acc* x, const Acc* filter, W lanes) {
  constexpr int L = W::L;
  constexpr int64_t ld = Shared ? 1 : T::Width;
  const auto tap = [&](int64_t t, int64_t step, int64_t dilation) KGEN_INLINE {
    const auto f = load<L>(filter + t * T::Width, lanes);
    KGEN_UNROLL for (int i = 0; i < Count; ++i) {
      const Acc* const from = x + (i * step + t * dilation) * ld;
      if constexpr (Shared) sums[i] = multiply_add(splat<L>(*from), f, sums[i]);
      else sums[i] = multiply_add(load<L>(from, lanes), f, sums[i]);
    }
  };
  if constexpr (T::Taps > 0) {
    KGEN_UNROLL for (int t = 0; t < T::Taps; ++t) tap(t, T::Step, T::Dilation);
  } else {
    for (int64_t t = 0; t < s.w.taps; ++t) tap(t, s.w.step, s.w.dilation);
  }
}

// One strip of results: `Count` adjacent positions, a vector of channels, of one row of coordinates for each c, q and r.
template <class T, int Count, bool Shared, class Acc, class W>
KGEN_FN void direct_strip(const DirectShape& s, const Acc* const* rows, int64_t count, int64_t w, int64_t g, const Acc* filter,
                          Acc* tile, int64_t tile_ld, W lanes) {
  Vec<Acc, W::L> sums[Count];
  KGEN_UNROLL for (int i = 0; i < Count; ++i) sums[i] = splat<W::L>(Acc(0));
  const int64_t first = Shared ? w * s.w.step : w * s.w.step * T::Width + g;
  for (int64_t r = 0; r < count; ++r, filter += s.w.taps * T::Width) {
    add_taps<T, Count, Shared>(sums, s, rows[r] + first, filter + g, lanes);
  }
  KGEN_UNROLL for (int i = 0; i < Count; ++i) store(tile + (w + i) * tile_ld + g, sums[i], lanes);
}

template <class Acc, bool Shared, class T, class Image, class Filter, class Finish>
void convolve_channels(int threads, const DirectShape& s, const DirectBlocks& how, const Image& image, const Filter& filter,
                       const Finish& finish) {
  constexpr int L = larger(4, kRegisterBytes / int(sizeof(Acc)));
  constexpr int Count = KGEN_AVX512 ? (Shared ? 12 : 8) : 4;
  constexpr int64_t block = T::Width, ld = Shared ? 1 : block, tile_ld = block + 16;
  const int64_t taps = s.d.taps * s.h.taps * s.w.taps, wide = larger<int64_t>(1, smaller(how.w, s.w.positions));
  const int64_t across = ceil_div(s.w.positions, wide), blocks = ceil_div(s.g, block);
  threads = direct_threads(threads, s);
  const int64_t wanted = threads > 1 ? ceil_div(4 * threads, larger<int64_t>(1, s.b * s.d.positions * across * blocks)) : 1;
  const int64_t high = larger<int64_t>(1, smaller(how.h, ceil_div(s.h.positions, wanted))), down = ceil_div(s.h.positions, high);
  Rooms common(scratch<0>(Rooms::bytes<Acc>(s.c * taps * blocks * block)));
  Acc* const packed = common.take<Acc>(s.c * taps * blocks * block);
  const int64_t tasks = s.b * s.d.positions * down * across * blocks;
  if (tasks > 0) pack_filter<T>(s, packed, filter);
  parallel_team(threads, [&] {
    const int64_t planes = s.c * s.d.taps, row = round_up(s.w.span(wide) * ld, 16);
    Rooms own(scratch<1>(Rooms::bytes<Acc>(planes * s.h.span() * row) + Rooms::bytes<Acc>(wide * tile_ld) +
                           Rooms::bytes<const Acc*>(planes * s.h.taps)));
    const RowRing<Acc> ring{own.take<Acc>(planes * s.h.span() * row), row, s.h.span()};
    Acc* const tile = own.take<Acc>(wide * tile_ld);
    const Acc** const rows = own.take<const Acc*>(planes * s.h.taps);
    team_share(tasks, [&](int64_t task) {
      const int64_t g0 = task % blocks * block, ng = smaller(block, s.g - g0);
      const int64_t w0 = task / blocks % across * wide, nw = smaller(wide, s.w.positions - w0);
      const int64_t h0 = task / (blocks * across) % down * high, nh = smaller(high, s.h.positions - h0);
      const int64_t d = task / (blocks * across * down) % s.d.positions, b = task / (blocks * across * down) / s.d.positions;
      const Acc* const own_filter = packed + g0 * s.c * taps;
      int64_t there = s.h.coordinate(h0, 0);  // rows of coordinates before this one are in the ring
      for (int64_t h = h0; h < h0 + nh; ++h) {
        for (int64_t coordinate = larger(there, s.h.coordinate(h, 0)); coordinate <= s.h.coordinate(h, s.h.taps - 1); ++coordinate) {
          for (int64_t plane = 0; plane < planes; ++plane) {
            const int64_t c = plane / s.d.taps, q = plane % s.d.taps;
            image(b, c, s.d.coordinate(d, q), coordinate, s.w.coordinate(w0, 0), s.w.span(nw), g0, Shared ? 1 : ng, ring.at(plane, coordinate), ld);
          }
        }
        there = s.h.coordinate(h, s.h.taps - 1) + 1;
        for (int64_t i = 0; i < planes * s.h.taps; ++i) rows[i] = ring.at(i / s.h.taps, s.h.coordinate(h, i % s.h.taps));
        vector_loop<L>(0, ng, [&](int64_t g, auto lanes) KGEN_INLINE {
          int64_t w = 0;
          const auto strips = [&](auto count) KGEN_INLINE {
            for (; w + count.value <= nw; w += count.value) {
              direct_strip<T, count.value, Shared>(s, rows, planes * s.h.taps, w, g, own_filter, tile, tile_ld, lanes);
            }
          };
          strips(std::integral_constant<int, Count>{});
          if constexpr (Count > 4) strips(std::integral_constant<int, 4>{});
          strips(std::integral_constant<int, 1>{});
        });
        finish(b, d, h, w0, g0, nw, ng, tile, tile_ld);
      }
    });
  });
}

// ---- vectors of positions -------------------------------------------------------------------------------------------

// Where rows of coordinates lie that a strip of results reads. Of positions that step over coordinates these come in phases: coordinates that
// are equal modulo the step are adjacent, so that adjacent positions read adjacent.
struct CoordinateRows {
  int64_t row, phase, plane;  // elements from a row, a phase of a row, a plane to the next one
  KGEN_FN int64_t of_tap(const Window& w, int64_t tap) const {
    return tap * w.dilation % w.step * phase + tap * w.dilation / w.step;
  }
};

// Results of `Rows` rows, `Count` vectors of positions each, whose first row of coordinates is at x.
template <class T, int Rows, int Count, class Acc>
KGEN_FN void direct_rows(const DirectShape& s, const CoordinateRows& at, const Acc* x, const Acc* filter, Acc* tile, int64_t tile_ld) {
  constexpr int L = larger(4, kRegisterBytes / int(sizeof(Acc)));
  Vec<Acc, L> sums[Rows * Count];
  KGEN_UNROLL for (int i = 0; i < Rows * Count; ++i) sums[i] = splat<L>(Acc(0));
  const int64_t step = s.h.step * at.row;
  for (int64_t plane = 0; plane < s.c * s.d.taps; ++plane) {
    for (int64_t r = 0; r < s.h.taps; ++r) {
      const Acc* const row = x + plane * at.plane + r * s.h.dilation * at.row;
      const auto tap = [&](int64_t coordinate, int64_t t) KGEN_INLINE {
        const auto f = splat<L>(filter[t]);
        KGEN_UNROLL for (int i = 0; i < Rows; ++i) {
          KGEN_UNROLL for (int j = 0; j < Count; ++j) {
            sums[i * Count + j] = multiply_add(load<L>(row + i * step + coordinate + j * L, Full<L>{}), f, sums[i * Count + j]);
          }
        }
      };
      if constexpr (T::Taps > 0) {
        KGEN_UNROLL for (int t = 0; t < T::Taps; ++t) {
          tap(t * T::Dilation % T::Step * at.phase + t * T::Dilation / T::Step, t);
        }
      } else {
        for (int64_t t = 0; t < s.w.taps; ++t) tap(at.of_tap(s.w, t), t);
      }
      filter += s.w.taps;
    }
  }
  KGEN_UNROLL for (int i = 0; i < Rows; ++i) {
    KGEN_UNROLL for (int j = 0; j < Count; ++j) store(tile + i * tile_ld + j * L, sums[i * Count + j], Full<L>{});
  }
}

template <class Acc, bool Shared, class T, class Image, class Filter, class Finish>
void convolve_rows(int threads, const DirectShape& s, const DirectBlocks& how, const Image& image, const Filter& filter,
                   const Finish& finish) {
  constexpr int L = larger(4, kRegisterBytes / int(sizeof(Acc))), Count = 2;
  const int64_t taps = s.d.taps * s.h.taps * s.w.taps, planes = s.c * s.d.taps, together = Shared ? larger<int64_t>(s.g, 1) : 1;
  const int64_t wide = larger<int64_t>(1, smaller(how.w, s.w.positions)), across = ceil_div(s.w.positions, wide);
  threads = direct_threads(threads, s);
  const int64_t blocks = ceil_div(s.g, together), others = s.b * s.d.positions * across * blocks;
  const int64_t wanted = threads > 1 ? ceil_div(4 * threads, larger<int64_t>(1, others)) : 1;
  const int64_t high = larger<int64_t>(1, smaller(how.h, ceil_div(s.h.positions, wanted))), down = ceil_div(s.h.positions, high);
  const int64_t tasks = others * down, beyond = (s.w.taps - 1) * s.w.dilation / s.w.step;
  const int64_t padded = round_up(wide, Count * L), phases = smaller(s.w.step, s.w.span());
  CoordinateRows at{.phase = round_up(padded + beyond, L)};
  at.row = at.phase * phases;
  at.plane = at.row * s.h.span(high);
  Rooms common(scratch<0>(Rooms::bytes<Acc>(s.g * s.c * taps)));
  Acc* const packed = common.take<Acc>(s.g * s.c * taps);
  for (int64_t i = 0; tasks > 0 && i < s.g * planes; ++i) {
    filter(i / planes, i % planes / s.d.taps, i % s.d.taps, s.h.taps, s.w.taps, packed + i * s.h.taps * s.w.taps, s.w.taps);
  }
  parallel_team(threads, [&] {
    Rooms own(scratch<1>(Rooms::bytes<Acc>(planes * at.plane) + Rooms::bytes<Acc>(high * padded)));
    Acc* const coordinates = own.take<Acc>(planes * at.plane);
    Acc* const tile = own.take<Acc>(high * padded);
    // what pads vectors is multiplied as well, and some of what memory may hold is slow
    for (int64_t i = 0; i < planes * at.plane; ++i) coordinates[i] = Acc(0);
    team_share(tasks, [&](int64_t task) {
      const int64_t w0 = task % across * wide, nw = smaller(wide, s.w.positions - w0);
      const int64_t h0 = task / across % down * high, nh = smaller(high, s.h.positions - h0);
      const int64_t d = task / (across * down) % s.d.positions, g0 = task / (across * down * s.d.positions) % blocks * together;
      const int64_t b = task / (across * down * s.d.positions * blocks);
      for (int64_t plane = 0; plane < planes; ++plane) {
        for (int64_t phase = 0; phase < phases; ++phase) {
          const int64_t all = (s.w.span(s.w.positions) - 1 - phase) / s.w.step + 1;
          image(b, g0, plane / s.d.taps, s.d.coordinate(d, plane % s.d.taps), phase, s.h.coordinate(h0, 0), s.h.span(nh), w0,
                smaller(nw + beyond, all - w0), coordinates + plane * at.plane + phase * at.phase, at.row);
        }
      }
      for (int64_t g = g0; g < g0 + together; ++g) {
        const Acc* const own_filter = packed + g * s.c * taps;
        for (int64_t w = 0; w < nw; w += Count * L) {
          int64_t h = 0;
          const auto strips = [&](auto rows, auto count) KGEN_INLINE {
            for (; h + rows.value <= nh; h += rows.value) {
              direct_rows<T, rows.value, count.value>(s, at, coordinates + h * s.h.step * at.row + w, own_filter,
                                                      tile + h * padded + w, padded);
            }
          };
          using std::integral_constant;
          if (nw - w > L) {
            strips(integral_constant<int, 4>{}, integral_constant<int, Count>{});
            strips(integral_constant<int, 1>{}, integral_constant<int, Count>{});
          } else {
            strips(integral_constant<int, 8>{}, integral_constant<int, 1>{});
            strips(integral_constant<int, 4>{}, integral_constant<int, 1>{});
            strips(integral_constant<int, 1>{}, integral_constant<int, 1>{});
          }
        }
        finish(b, g, d, h0, w0, nh, nw, tile, padded);
      }
    });
  });
}

}  // namespace kgen
