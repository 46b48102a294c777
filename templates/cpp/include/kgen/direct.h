// Convolutions without a matmul: each output is a sum over few taps, and over few channels, in registers. What is convolved and
// what becomes of the results comes from generated code.
//
//   convolve_channels<float>(threads, shape, blocks, shared, image, filter, finish);   // neighbours in a vector are channels g
//   convolve_rows<float>(threads, shape, blocks, shared, image, filter, finish);       // ... are positions w along a row
//
// Places of the image are numbered as the taps come to them: place = position * step + tap * dilation, in d, h and w. `image`
// computes a rectangle of places into a thread's memory, once for all taps and outputs there, whatever is fused into it:
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
  KGEN_FN int64_t place(int64_t position, int64_t tap) const { return position * step + tap * dilation; }
  // Places that `count` neighbouring positions come to.
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

// ---- vectors of channels --------------------------------------------------------------------------------------------

// The filter as [c][q][r][s][g], rows `ld` elements apart: once for all threads, to whom it is worth packing.
template <class Acc, class Filter>
void pack_filter(const DirectShape& s, int64_t ld, Acc* to, const Filter& filter) {
  for (int64_t c = 0; c < s.c; ++c) {
    for (int64_t q = 0; q < s.d.taps; ++q) {
      for (int64_t r = 0; r < s.h.taps; ++r, to += s.w.taps * ld) filter(c, q, r, s.w.taps, s.g, to, ld);
    }
  }
}

// Rows of places, each [w][g], of which the last few are kept: those that one row of results needs. Of channels c and planes q.
template <class Acc>
struct RowRing {
  Acc* data;
  int64_t row, rows;  // elements of a row, and rows of a ring
  KGEN_FN Acc* at(int64_t plane, int64_t place) const { return data + (plane * rows + place % rows) * row; }
};

// One strip of results: `Count` neighbouring positions, a vector of channels.
template <class Acc, int Count, bool Shared, class W>
KGEN_FN void direct_strip(const DirectShape& s, const RowRing<Acc>& ring, int64_t h, int64_t w, int64_t g, const Acc* filter,
                          int64_t filter_ld, int64_t ld, Acc* tile, int64_t tile_ld, W lanes) {
  constexpr int L = W::L;
  Vec<Acc, L> sums[Count];
  KGEN_UNROLL for (int i = 0; i < Count; ++i) sums[i] = splat<L>(Acc(0));
  const int64_t step = s.w.step * ld, dilation = s.w.dilation * ld;
  for (int64_t plane = 0; plane < s.c * s.d.taps; ++plane) {
    for (int64_t r = 0; r < s.h.taps; ++r) {
      const Acc* x = ring.at(plane, s.h.place(h, r)) + w * step + (Shared ? 0 : g);
      for (int64_t t = 0; t < s.w.taps; ++t, x += dilation, filter += filter_ld) {
        const auto f = load<L>(filter + g, lanes);
        KGEN_UNROLL for (int i = 0; i < Count; ++i) {
          if constexpr (Shared) sums[i] = multiply_add(splat<L>(x[i * step]), f, sums[i]);
          else sums[i] = multiply_add(load<L>(x + i * step, lanes), f, sums[i]);
        }
      }
    }
  }
  KGEN_UNROLL for (int i = 0; i < Count; ++i) store(tile + (w + i) * tile_ld + g, sums[i], lanes);
}

template <class Acc, bool Shared, class Image, class Filter, class Finish>
void convolve_channels(int threads, const DirectShape& s, const DirectBlocks& how, const Image& image, const Filter& filter,
                       const Finish& finish) {
  constexpr int L = larger(4, kRegisterBytes / int(sizeof(Acc)));
  constexpr int Count = Shared ? 12 : 8;
  const int64_t taps = s.d.taps * s.h.taps * s.w.taps, filter_ld = round_up(s.g, 64);
  const int64_t wide = larger<int64_t>(1, smaller(how.w, s.w.positions)), block = round_up(smaller(how.g, s.g), L);
  const int64_t across = ceil_div(s.w.positions, wide), blocks = ceil_div(s.g, block);
  threads = direct_threads(threads, s);
  const int64_t wanted = threads > 1 ? ceil_div(4 * threads, larger<int64_t>(1, s.b * s.d.positions * across * blocks)) : 1;
  const int64_t high = larger<int64_t>(1, smaller(how.h, ceil_div(s.h.positions, wanted))), down = ceil_div(s.h.positions, high);
  // of what no g tells apart, a row of places is one column
  const int64_t ld = Shared ? 16 : block, tile_ld = block + 16;
  Rooms common(scratch<0>(Rooms::bytes<Acc>(s.c * taps * filter_ld)));
  Acc* const packed = common.take<Acc>(s.c * taps * filter_ld);
  if (s.b * s.g * s.d.positions * s.h.positions * s.w.positions > 0) pack_filter(s, filter_ld, packed, filter);
  parallel_team(threads, [&] {
    const int64_t planes = s.c * s.d.taps, row = s.w.span(wide) * ld;
    Rooms own(scratch<1>(Rooms::bytes<Acc>(planes * s.h.span() * row) + Rooms::bytes<Acc>(wide * tile_ld)));
    const RowRing<Acc> ring{own.take<Acc>(planes * s.h.span() * row), row, s.h.span()};
    Acc* const tile = own.take<Acc>(wide * tile_ld);
    team_share(s.b * s.d.positions * down * across * blocks, [&](int64_t task) {
      const int64_t g0 = task % blocks * block, ng = smaller(block, s.g - g0);
      const int64_t w0 = task / blocks % across * wide, nw = smaller(wide, s.w.positions - w0);
      const int64_t h0 = task / (blocks * across) % down * high, nh = smaller(high, s.h.positions - h0);
      const int64_t d = task / (blocks * across * down) % s.d.positions, b = task / (blocks * across * down) / s.d.positions;
      int64_t there = s.h.place(h0, 0);  // rows of places before this one are in the ring
      for (int64_t h = h0; h < h0 + nh; ++h) {
        for (int64_t place = larger(there, s.h.place(h, 0)); place <= s.h.place(h, s.h.taps - 1); ++place) {
          for (int64_t plane = 0; plane < planes; ++plane) {
            const int64_t c = plane / s.d.taps, q = plane % s.d.taps;
            image(b, c, s.d.place(d, q), place, s.w.place(w0, 0), s.w.span(nw), g0, Shared ? 1 : ng, ring.at(plane, place), ld);
          }
        }
        there = s.h.place(h, s.h.taps - 1) + 1;
        vector_loop<L>(0, ng, [&](int64_t g, auto lanes) KGEN_INLINE {
          int64_t w = 0;
          const auto strip = [&](auto count) KGEN_INLINE {
            for (; w + count.value <= nw; w += count.value) {
              direct_strip<Acc, count.value, Shared>(s, ring, h, w, g, packed + g0, filter_ld, ld, tile, tile_ld, lanes);
            }
          };
          strip(std::integral_constant<int, Count>{});
          strip(std::integral_constant<int, 4>{});
          strip(std::integral_constant<int, 1>{});
        });
        finish(b, d, h, w0, g0, nw, ng, tile, tile_ld);
      }
    });
  });
}

}  // namespace kgen
