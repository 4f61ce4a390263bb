// How ranks (GPUs that share a batch) exchange numbers. A rank posts doubles, and collects the doubles of all ranks, in
// the order of the ranks. No kernels.
//
// Peer memory. Every rank has a mailbox in its own memory, to which all other ranks can write. It has two slots, which
// alternate from call to call; a slot has a row of letters for every rank. A letter is 16 bytes that are written and
// read in one access: a double, and the number of its call. So no flag is ever reset, and no fence is needed. A slot is
// free when it is written again: a rank posts call c + 2 after it has collected call c + 1 from all ranks, and they
// posted call c + 1 after they had collected call c. The device counts the calls, so that a replayed graph continues
// the count.
//
// Gathered. If another library exchanges the numbers, they lie in rows of doubles, one row for every rank.
//
// A rank posts its number of rows, the signature of its call (which shows whether another rank makes a different call),
// and a few doubles for every feature.
//
// A call does not wait forever: after `timeout` it fails and writes a status to the host's memory, and every later call
// fails, too.
#pragma once
#include "common/common.cuh"

enum : int { STATUS_TIMEOUT = 1, STATUS_OTHER_CALL = 2, STATUS_ONE_ROW = 3 };
enum : int { ROWS_AT = 0, CALL_AT = 1, FEATURES_AT = 2 };  // offsets in the numbers that a rank posts

struct Ranks {  // in device memory; gsbn/_ranks/exchange.py writes it; every field has 8 bytes
    long long rank, size;
    long long letters;           // letters in a row of a mailbox
    unsigned long long timeout;  // ns
    volatile long long* status;  // in the host's memory
    unsigned long long call;     // calls of this rank that have ended
    unsigned long long leaving;  // CTAs of the present call that have called leave()
    unsigned long long broken;   // a call has failed
    char* mailbox[1];            // the mailbox of each rank, this one too
};

__device__ __forceinline__ unsigned long long now() {  // ns
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}

template <typename R>
struct GroupStatistics {  // a feature's statistics over all ranks
    R rows, mean, m2;
    bool right;
};

// A call, as one thread sees it. A rank posts NUMBERS doubles for every feature.
template <int NUMBERS>
struct Exchange {
    static constexpr int BATCH = 8 / NUMBERS;  // ranks whose letters are loaded at once

    Ranks* ranks;
    const double* gathered;  // rows of `pitch` numbers, or null
    long long pitch;
    double signature;
    unsigned long long call, deadline;
    int rank, size;
    const char* own;  // where the call's letters begin in this rank's mailbox: a row for every rank
    long long letters;

    __device__ Exchange(Ranks* ranks, const double* gathered, long long pitch, long long signature)
        : ranks(ranks),
          gathered(gathered),
          pitch(pitch),
          signature(double(signature)),
          call(load_volatile(&ranks->call) + 1),
          deadline(now() + ranks->timeout),
          rank(int(ranks->rank)),
          size(int(ranks->size)),
          letters(ranks->letters) {
        if (gathered == nullptr) own = ranks->mailbox[rank] + row(0);
    }

    // Where the letters from a rank begin in every mailbox, in bytes.
    __device__ long long row(int from) const { return ((call & 1) * size + from) * letters * 16; }

    __device__ void post(long long i, double value) const {
#pragma unroll 4
        for (int to = 0; to < size; ++to)
            asm volatile("{\n.reg .b128 all;\nmov.b128 all, {%1, %2};\nst.relaxed.sys.global.b128 [%0], all;\n}" ::"l"(
                             ranks->mailbox[to] + row(rank) + i * 16),
                         "l"(__double_as_longlong(value)), "l"(call)
                         : "memory");
    }

    __device__ void post_header(double rows) const {
        post(ROWS_AT, rows);
        post(CALL_AT, signature);
    }

    __device__ void post_feature(long long c, const double (&numbers)[NUMBERS]) const {
#pragma unroll
        for (int j = 0; j < NUMBERS; ++j) post(FEATURES_AT + NUMBERS * c + j, numbers[j]);
    }

    __device__ bool peek(int from, long long i, double& value) const {
        if (gathered != nullptr) {
            value = gathered[from * pitch + i];
            return true;
        }
        unsigned long long bits, of;
        asm volatile("{\n.reg .b128 all;\nld.relaxed.sys.global.b128 all, [%2];\nmov.b128 {%0, %1}, all;\n}"
                     : "=l"(bits), "=l"(of)
                     : "l"(own + (from * letters + i) * 16)
                     : "memory");
        value = __longlong_as_double(bits);
        return of == call;
    }

    __device__ void fail(int status) const {
        *static_cast<volatile unsigned long long*>(&ranks->broken) = 1;
        *ranks->status = status;
        __threadfence_system();
    }

    enum Found { NOT_YET, HERE, NEVER };

    // Reads what BATCH ranks, from `from` on, have posted for feature c; a rank that does not exist gives 0 rows.
    // Returns NEVER if one of the ranks makes a different call, or has not posted in time.
    __device__ Found look(int from, long long c, double (&rows)[BATCH], double (&numbers)[NUMBERS][BATCH]) const {
        bool here = true, wrong = false;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            rows[i] = 0.0;
#pragma unroll
            for (int j = 0; j < NUMBERS; ++j) numbers[j][i] = 0.0;
            if (from + i >= size) continue;
            double theirs;
            const bool header = peek(from + i, ROWS_AT, rows[i]) & peek(from + i, CALL_AT, theirs);
            here &= header;
#pragma unroll
            for (int j = 0; j < NUMBERS; ++j) here &= peek(from + i, FEATURES_AT + NUMBERS * c + j, numbers[j][i]);
            // Where another library gathers, a rank without rows posts only this number.
            const bool other = __double_as_longlong(theirs) != __double_as_longlong(signature);
            wrong |= header && other && !(gathered != nullptr && rows[i] == 0.0);
        }
        if (wrong) fail(STATUS_OTHER_CALL);
        if (wrong || load_volatile(&ranks->broken)) return NEVER;
        if (here) return HERE;
        if (now() > deadline) fail(STATUS_TIMEOUT);
        return NOT_YET;
    }

    // The same, but waits for the ranks; returns false instead of NEVER.
    __device__ bool collect(int from, long long c, double (&rows)[BATCH], double (&numbers)[NUMBERS][BATCH]) const {
        Found found;
        while ((found = look(from, c, rows, numbers)) == NOT_YET) __nanosleep(20);
        return found == HERE;
    }

    // Whether `statistics` would return without waiting.
    __device__ bool ready(long long c) const {
        double rows[BATCH], numbers[NUMBERS][BATCH];
#pragma unroll 1
        for (int from = 0; from < size; from += BATCH)
            if (look(from, c, rows, numbers) == NOT_YET) return false;
        return true;
    }

    // Mean and M2 of feature c over the rows of all ranks. They are merged in the order of the ranks, about the mean of
    // the first rank that has rows, so that equal means stay exact. Then they are merged again about the mean that was
    // found, in case the first rank is unlike the others. Every rank computes the same bits. R is double; beside a
    // mainloop it is float, because the tensor core waits tens of cycles for every float64 instruction.
    template <typename R>
    __device__ GroupStatistics<R> statistics(long long c) const {
        static_assert(NUMBERS == 2, "mean and M2");
        GroupStatistics<R> all = {R(0), R(0), R(0), true};
        R pivot = R(0), sum = R(0);
        double rows[BATCH], moments[2][BATCH];
        const auto &mean = moments[0], &m2 = moments[1];
#pragma unroll 1
        for (int from = 0; from < size; from += BATCH) {
            all.right &= collect(from, c, rows, moments);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const R r = from + i < size ? R(rows[i]) : R(0);
                if (r == R(0)) continue;
                if (all.rows == R(0)) pivot = R(mean[i]);
                all.rows += r;
                sum += r * (R(mean[i]) - pivot);
            }
        }
        if (!all.right) {
            all.mean = all.m2 = R(__int_as_float(0x7FC00000));
            return all;
        }
        if (all.rows == R(0)) return all;
        const R shift = sum / all.rows, near = pivot + shift;
        R rest = R(0);
#pragma unroll 1
        for (int from = 0; from < size; from += BATCH) {
            if (size > BATCH) all.right &= collect(from, c, rows, moments);  // otherwise `moments` still holds them
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const R r = from + i < size ? R(rows[i]) : R(0);
                if (r == R(0)) continue;
                const R d = R(mean[i]) - pivot - shift;
                all.m2 += R(m2[i]) + r * d * d;
                rest += r * (R(mean[i]) - near);
            }
        }
        all.mean = near + rest / all.rows;
        if (all.rows == R(1)) {
            fail(STATUS_ONE_ROW);
            all.right = false;
        }
        return all;
    }

    // Adds what all ranks posted for feature c, and returns the sum of their rows. If a rank is missing, all[0] is NaN.
    __device__ double sums(long long c, double (&all)[NUMBERS]) const {
        double of_rows[BATCH], of[NUMBERS][BATCH], rows = 0.0;
#pragma unroll
        for (int j = 0; j < NUMBERS; ++j) all[j] = 0.0;
#pragma unroll 1
        for (int from = 0; from < size; from += BATCH) {
            if (!collect(from, c, of_rows, of)) all[0] = __longlong_as_double(0x7FF8000000000000LL);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                rows += of_rows[i];
#pragma unroll
                for (int j = 0; j < NUMBERS; ++j) all[j] += of[j][i];
            }
        }
        return rows;
    }

    // One thread of each of the `ctas` CTAs calls this when its CTA no longer needs the exchange. Returns true to the
    // last one.
    __device__ bool leave(unsigned ctas) const {
        __threadfence();
        if (atomicAdd(&ranks->leaving, 1ULL) != ctas - 1) return false;
        ranks->leaving = 0;
        ranks->call = call;
        return true;
    }
};
