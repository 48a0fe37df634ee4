// y = activation((x - mean) / sqrt(variance + eps) * scale + bias) over groups of channels, and its gradients. Sums
// follow one order whatever the number of threads: rows in blocks, blocks in pieces, pieces one after the other.
//
// Letters: B batch, S places of an image, C channels, G groups of C / G neighbouring channels; x, y [B, S, C],
// parameters [2, C], scale and bias.

#include <algorithm>
#include <cmath>

#include "activation.h"
#include "crew.h"

namespace fornax {
namespace {

constexpr int64_t kBlock = 16;   // rows whose mean is taken together
constexpr int64_t kPiece = 128;  // rows of a task

struct Sizes {
  int64_t B, S, C, G;
  int64_t width() const { return round_up(C, kLanes); }
  int64_t pieces() const { return (S + kPiece - 1) / kPiece; }
  double count() const { return static_cast<double>(S) * static_cast<double>(C / G); }
};

// A channel's numbers, each [C] filled up to whole vectors: y = (x - mean) * factor * scale + bias.
struct Channels {
  const float *mean, *factor, *scale, *bias;
};

template <typename T>
inline void widen_row(const T* from, int64_t C, float* line) {
  for (int64_t c = 0; c < C; ++c) line[c] = widen(from[c]);
}

// Mean and summed squares of the differences from it, of each channel over rows [first, last) of an image: block by
// block, joined as Chan, Golub and LeVeque 1983 do, so that a mean far from 0 costs no digits.
template <typename T>
void measure(const T* x, int64_t first, int64_t last, int64_t C, float* rows, float* mean,
             float* squares) {
  const int64_t width = round_up(C, kLanes);
  std::fill(mean, mean + width, 0.0f);
  std::fill(squares, squares + width, 0.0f);
  std::fill(rows, rows + kBlock * width, 0.0f);
  for (int64_t start = first; start < last; start += kBlock) {
    const int64_t n = std::min(kBlock, last - start), before = start - first;
    for (int64_t i = 0; i < n; ++i) widen_row(x + (start + i) * C, C, rows + i * width);
    const Vec part = splat(1.0f / static_cast<float>(n));
    const float share = static_cast<float>(n) / static_cast<float>(before + n);
    for (int64_t c = 0; c < width; c += kLanes) {
      Vec sum = {}, square = {};
      for (int64_t i = 0; i < n; ++i) sum += load(rows + i * width + c);
      const Vec middle = sum * part;
      for (int64_t i = 0; i < n; ++i) {
        const Vec away = load(rows + i * width + c) - middle;
        square += away * away;
      }
      const Vec step = middle - load(mean + c);
      store(mean + c, load(mean + c) + step * splat(share));
      square += step * step * splat(share * static_cast<float>(before));
      store(squares + c, load(squares + c) + square);
    }
  }
}

// Mean and 1 / sqrt(variance + eps) of each channel's group, of the means and squares of an image's pieces.
void join(const Sizes& s, const float* parts, float eps, float* mean, float* factor) {
  const int64_t each = s.C / s.G, width = s.width();
  for (int64_t g = 0; g < s.G; ++g) {
    double total = 0, squares = 0;
    for (int64_t p = 0; p < s.pieces(); ++p) {
      const double n = static_cast<double>(std::min(kPiece, s.S - p * kPiece));
      for (int64_t c = g * each; c < (g + 1) * each; ++c) total += n * parts[2 * p * width + c];
    }
    const double middle = total / s.count();
    for (int64_t p = 0; p < s.pieces(); ++p) {
      const double n = static_cast<double>(std::min(kPiece, s.S - p * kPiece));
      for (int64_t c = g * each; c < (g + 1) * each; ++c) {
        const double away = parts[2 * p * width + c] - middle;
        squares += parts[(2 * p + 1) * width + c] + n * away * away;
      }
    }
    const auto scale = static_cast<float>(1 / std::sqrt(squares / s.count() + eps));
    std::fill(mean + g * each, mean + (g + 1) * each, static_cast<float>(middle));
    std::fill(factor + g * each, factor + (g + 1) * each, scale);
  }
}

// What all tasks of a call read, in memory of the calling thread: [B] times `each` floats, then scale and bias.
struct Room {
  float *parts, *mean, *factor, *scale, *bias;
  int64_t part;  // floats of an image's pieces
};

Room room_of(const Sizes& s, int64_t more, const float* parameters, Arena& arena, float** rest) {
  const int64_t width = s.width(), part = s.pieces() * 2 * width;
  arena.start(s.B * part + 2 * s.B * width + 2 * width + more);
  Room room = {arena.take(s.B * part), arena.take(s.B * width), arena.take(s.B * width),
               arena.take(width), arena.take(width), part};
  std::fill(room.mean, room.bias + width, 0.0f);
  std::copy_n(parameters, s.C, room.scale);
  std::copy_n(parameters + s.C, s.C, room.bias);
  if (rest) *rest = arena.take(more);
  return room;
}

// Runs work(image, piece, first row, last row) for all pieces.
template <typename Work>
void over_pieces(ffi::ThreadPool& pool, const Sizes& s, const Work& work) {
  const int64_t pieces = s.pieces();
  share_evenly(pool, s.B * pieces, s.B * s.S * s.C, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t piece = i % pieces;
      work(i / pieces, piece, piece * kPiece, std::min(s.S, (piece + 1) * kPiece));
    }
  });
}

template <typename T>
void find_statistics(ffi::ThreadPool& pool, const Sizes& s, const T* x, float eps,
                     const Room& room) {
  const int64_t width = s.width();
  over_pieces(pool, s, [=](int64_t b, int64_t piece, int64_t first, int64_t last) {
    Arena& arena = Arena::of_this_thread();
    arena.start(kBlock * width);
    float* part = room.parts + b * room.part + 2 * piece * width;
    measure(x + b * s.S * s.C, first, last, s.C, arena.take(kBlock * width), part, part + width);
  });
  for (int64_t b = 0; b < s.B; ++b) {
    join(s, room.parts + b * room.part, eps, room.mean + b * width, room.factor + b * width);
  }
}

template <typename T>
void run(ffi::ThreadPool& pool, const Sizes& s, const ffi::AnyBuffer& x_, const float* parameters,
         float eps, bool silu, ffi::AnyBuffer& y_) {
  static thread_local Arena kept;
  const auto* x = static_cast<const T*>(x_.untyped_data());
  auto* y = static_cast<T*>(y_.untyped_data());
  const Room room = room_of(s, 0, parameters, kept, nullptr);
  const int64_t width = s.width();
  find_statistics(pool, s, x, eps, room);
  over_pieces(pool, s, [=](int64_t b, int64_t, int64_t first, int64_t last) {
    Arena& arena = Arena::of_this_thread();
    arena.start(width);
    float* line = arena.take(width);
    const float *mean = room.mean + b * width, *factor = room.factor + b * width;
    for (int64_t i = b * s.S + first; i < b * s.S + last; ++i) {
      widen_row(x + i * s.C, s.C, line);
      for (int64_t c = 0; c < width; c += kLanes) {
        const Vec normal = (load(line + c) - load(mean + c)) * load(factor + c);
        const Vec z = normal * load(room.scale + c) + load(room.bias + c);
        store(line + c, silu ? z * logistic(z) : z);
      }
      for (int64_t c = 0; c < s.C; ++c) narrow(line[c], y + i * s.C + c);
    }
  });
}

// Of a vector of channels: x normalised, and the gradient of what scale and bias make of it.
inline Vec slope_of(Vec x, Vec dy, Vec mean, Vec factor, Vec scale, Vec bias, bool silu,
                    Vec* normal) {
  *normal = (x - mean) * factor;
  if (!silu) return dy;
  const Vec z = *normal * scale + bias, s = logistic(z);
  return dy * (s + z * s * (1.0f - s));
}

// With n = (x - mean) f and d the gradient of n scale + bias: dx = f (scale d - mean(scale d) - n mean(n scale d)),
// means over a group; dscale = sum n d; dbias = sum d.
template <typename T>
void run_gradient(ffi::ThreadPool& pool, const Sizes& s, const ffi::AnyBuffer& x_,
                  const ffi::AnyBuffer& dy_, const float* parameters, float eps, bool silu,
                  ffi::AnyBuffer& dx_, float* dparameters) {
  static thread_local Arena kept;
  const auto* x = static_cast<const T*>(x_.untyped_data());
  const auto* dy = static_cast<const T*>(dy_.untyped_data());
  auto* dx = static_cast<T*>(dx_.untyped_data());
  const int64_t width = s.width();
  float* means = nullptr;  // of scale d and n scale d, [B, 2, C]
  const Room room = room_of(s, 2 * s.B * width, parameters, kept, &means);
  find_statistics(pool, s, x, eps, room);
  over_pieces(pool, s, [=](int64_t b, int64_t piece, int64_t first, int64_t last) {
    Arena& arena = Arena::of_this_thread();
    arena.start(2 * width);
    float *line = arena.take(width), *given = arena.take(width);
    std::fill(line, line + 2 * width, 0.0f);
    const float *mean = room.mean + b * width, *factor = room.factor + b * width;
    float *sums = room.parts + b * room.part + 2 * piece * width, *along = sums + width;
    std::fill(sums, sums + 2 * width, 0.0f);
    for (int64_t i = b * s.S + first; i < b * s.S + last; ++i) {
      widen_row(x + i * s.C, s.C, line);
      widen_row(dy + i * s.C, s.C, given);
      for (int64_t c = 0; c < width; c += kLanes) {
        Vec normal;
        const Vec d = slope_of(load(line + c), load(given + c), load(mean + c), load(factor + c),
                               load(room.scale + c), load(room.bias + c), silu, &normal);
        store(sums + c, load(sums + c) + d);
        store(along + c, load(along + c) + d * normal);
      }
    }
  });
  const int64_t each = s.C / s.G;
  std::fill(means, means + 2 * s.B * width, 0.0f);
  std::fill(dparameters, dparameters + 2 * s.C, 0.0f);
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t g = 0; g < s.G; ++g) {
      double plain = 0, along = 0;
      for (int64_t c = g * each; c < (g + 1) * each; ++c) {
        double channel[2] = {};
        for (int64_t p = 0; p < s.pieces(); ++p) {
          for (int64_t k = 0; k < 2; ++k) {
            channel[k] += room.parts[b * room.part + (2 * p + k) * width + c];
          }
        }
        plain += channel[0] * room.scale[c];
        along += channel[1] * room.scale[c];
        dparameters[c] += static_cast<float>(channel[1]);
        dparameters[s.C + c] += static_cast<float>(channel[0]);
      }
      float* to = means + 2 * b * width + g * each;
      std::fill(to, to + each, static_cast<float>(plain / s.count()));
      std::fill(to + width, to + width + each, static_cast<float>(along / s.count()));
    }
  }
  over_pieces(pool, s, [=](int64_t b, int64_t, int64_t first, int64_t last) {
    Arena& arena = Arena::of_this_thread();
    arena.start(2 * width);
    float *line = arena.take(width), *given = arena.take(width);
    std::fill(line, line + 2 * width, 0.0f);
    const float *mean = room.mean + b * width, *factor = room.factor + b * width;
    const float *plain = means + 2 * b * width, *along = plain + width;
    for (int64_t i = b * s.S + first; i < b * s.S + last; ++i) {
      widen_row(x + i * s.C, s.C, line);
      widen_row(dy + i * s.C, s.C, given);
      for (int64_t c = 0; c < width; c += kLanes) {
        Vec normal;
        const Vec scale = load(room.scale + c), f = load(factor + c);
        const Vec d = slope_of(load(line + c), load(given + c), load(mean + c), f, scale,
                               load(room.bias + c), silu, &normal);
        store(line + c, f * (scale * d - load(plain + c) - normal * load(along + c)));
      }
      for (int64_t c = 0; c < s.C; ++c) narrow(line[c], dx + i * s.C + c);
    }
  });
}

Sizes sizes_of(const ffi::AnyBuffer& x, int64_t groups) {
  const auto sizes = x.dimensions();
  return {sizes[0], sizes[1], sizes[2], groups};
}

ffi::Error group_norm_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> parameters,
                           ffi::Result<ffi::AnyBuffer> y, int64_t groups, float eps, bool silu) {
  const auto call = x.element_type() == ffi::F32 ? run<float> : run<Half>;
  call(pool, sizes_of(x, groups), x, parameters.typed_data(), eps, silu, *y);
  return ffi::Error::Success();
}

ffi::Error group_norm_gradient_call(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy,
                                    ffi::Buffer<ffi::F32> parameters,
                                    ffi::Result<ffi::AnyBuffer> dx,
                                    ffi::Result<ffi::Buffer<ffi::F32>> dparameters, int64_t groups,
                                    float eps, bool silu) {
  const auto call = x.element_type() == ffi::F32 ? run_gradient<float> : run_gradient<Half>;
  call(pool, sizes_of(x, groups), x, dy, parameters.typed_data(), eps, silu, *dx,
       dparameters->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace fornax

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_group_norm, fornax::group_norm_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("groups")
                                  .Attr<float>("eps")
                                  .Attr<bool>("silu"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(fornax_group_norm_gradient, fornax::group_norm_gradient_call,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("groups")
                                  .Attr<float>("eps")
                                  .Attr<bool>("silu"));
