// copy_rows: copies up to three matrices, row by row, to rows with another alignment. TMA needs rows that start on 16
// bytes: this kernel makes them before TMA reads, or copies them away after TMA wrote.
//
//   from[i] (rows, cols), row pitch from_row  ->  to[i] (rows, cols), row pitch to_row; sizes are in pieces of 2 bytes
//
// A thread writes WORDS words of 16 bytes to `to`. They lie THREADS apart, so a warp writes 512 adjacent bytes of a
// row. The thread makes a word by shifts from the two words of `from` that hold its bytes; the next lane reads one of
// these two words, too. At both ends of a row of `to`, a word that lies only partly in the row is written in pieces.
// The kernel writes no byte outside the rows of `to`. It reads some bytes outside the rows of `from`, but inside the
// matrix. An item of work is WORDS * THREADS words.
//
// Bytes moved: each byte is read once and written once, the minimum.
#include "common/common.cuh"

constexpr int MATRICES = 3;  // in a launch; read by gsbn/_plan/copies.py
constexpr int THREADS = 256, WORDS = 4;
using Piece = unsigned short;
constexpr int PIECES = 16 / sizeof(Piece);  // pieces in a word

struct CopyRowsProblem {
    long long rows[3], cols[3];        // 0 rows for no matrix
    long long from_row[3], to_row[3];  // pitches, above zero
};

__device__ __forceinline__ unsigned misfit(const Piece* at) {
    return reinterpret_cast<size_t>(at) % 16 / sizeof(Piece);
}

// Shifts a word down by one piece, and puts another piece at its end.
__device__ __forceinline__ uint4 push(const uint4& word, unsigned piece) {
    return make_uint4(__funnelshift_r(word.x, word.y, 16), __funnelshift_r(word.y, word.z, 16),
                      __funnelshift_r(word.z, word.w, 16), word.w >> 16 | piece << 16);
}

// The word at an address on 16 bytes; pieces outside [begin, end) become zero.
__device__ __forceinline__ uint4 read_word(const Piece* at, const Piece* begin, const Piece* end) {
    if (at >= begin && at + PIECES <= end) return *reinterpret_cast<const uint4*>(at);
    uint4 word = {0, 0, 0, 0};
#pragma unroll 1
    for (int e = 0; e < PIECES; ++e) word = push(word, at + e >= begin && at + e < end ? at[e] : 0);
    return word;
}

// The word that begins at piece `first` of `low` and ends in `high`.
__device__ __forceinline__ uint4 straddling_word(const uint4& low, const uint4& high, unsigned first) {
    unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = first & 4 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = first & 2 ? w[i + 1] : w[i];
    const unsigned bits = first % 2 * 16;
    return make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                      __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_rows(const __grid_constant__ CopyRowsProblem p, const Piece* from_a, Piece* to_a, const Piece* from_b,
              Piece* to_b, const Piece* from_c, Piece* to_c) {
    await_kernel_ahead();
    // length: the most words that a row of `to` can touch, wherever it starts; items: how many items a matrix has
    const auto length = [&](int i) { return (p.cols[i] + PIECES - 2) / PIECES + 1; };
    const auto items = [&](int i) { return (p.rows[i] * length(i) + WORDS * THREADS - 1) / (WORDS * THREADS); };
    const long long first = items(0), second = first + items(1);
    for_each_item(second + items(2), [&](long long item) {
        const int of = item < first ? 0 : item < second ? 1 : 2;
        item -= of == 0 ? 0 : of == 1 ? first : second;
        const Piece* from = of == 0 ? from_a : of == 1 ? from_b : from_c;
        Piece* to = of == 0 ? to_a : of == 1 ? to_b : to_c;
        const long long rows = p.rows[of], cols = p.cols[of], wide = length(of), start = item * WORDS * THREADS;
        const Piece* end = from + (rows - 1) * p.from_row[of] + cols;
        const long long row0 = start / wide;
        const unsigned rest = unsigned(start % wide) + threadIdx.x, width = unsigned(wide);

        Piece* line[WORDS];    // a word's row of `to`
        long long col[WORDS];  // the column of a word's first piece; it may lie before the row
        uint4 low[WORDS], high[WORDS];
        unsigned shift[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const unsigned at = rest + i * THREADS;
            const long long row = row0 + at / width;
            line[i] = to + row * p.to_row[of];
            col[i] = 1LL * PIECES * (at % width) - misfit(line[i]);
            if (row >= rows) col[i] = cols;  // nothing to write
            if (col[i] >= cols) continue;
            const Piece* source = from + row * p.from_row[of] + col[i];
            shift[i] = misfit(source);
            low[i] = read_word(source - shift[i], from, end);
            high[i] = shift[i] ? read_word(source - shift[i] + PIECES, from, end) : low[i];
        }
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            if (col[i] >= cols) continue;
            uint4 word = straddling_word(low[i], high[i], shift[i]);
            if (col[i] >= 0 && col[i] + PIECES <= cols) {
                *reinterpret_cast<uint4*>(line[i] + col[i]) = word;
            } else {
#pragma unroll 1
                for (long long c = col[i]; c < min(col[i] + PIECES, cols); ++c, word = push(word, 0))
                    if (c >= 0) line[i][c] = Piece(word.x);
            }
        }
    });
}
