// ANS around nvCOMP: where coded slices go, the payloads they become, and what may be decoded.
#include "common.cuh"

using Address = unsigned long long;
using Nbytes = unsigned long long; // nvCOMP's size_t

// A task's part in a batch, one a task: ROW of ans.py.
struct AnsRow {
    Address address;          // of the original bytes, or of where they will be: a multiple of 16
    unsigned original_nbytes; // their number
    unsigned slice_nbytes;    // of each slice but the last, as the encoder cuts them: 512 n
    unsigned slice_first;     // its slices in the batch's arrays:
    unsigned slices;          //   [slice_first, slice_first + slices)
    unsigned room_nbytes;     // for each coded slice
    unsigned word;            // bits 0-7: generation of the coded bytes, or 0: raw, for the
                              //   reason in bits 16-23; bits 8-15: kind of the elements
    unsigned object_first;    // the tasks of its object:
    unsigned object_count;    //   [object_first, object_first + object_count)
};

// What an encoder made of a task: RESULT of ans.py.
struct AnsResult {
    unsigned char format;
    unsigned char raw_reason;
    unsigned short reserved;
    unsigned object_nbytes; // length of its object
};

// A coded slice that stands, for where nvCOMP must not see what was stored: SPARE of ans.py.
struct AnsSpare {
    Address address;
    Nbytes coded_nbytes;
    Address target; // where its original bytes may go, those of all users alike
    Nbytes original_nbytes;
};

constexpr unsigned FORMAT_RAW = 0, FORMAT_ANS = 1;          // objects.Format
constexpr unsigned SAVES_TOO_LITTLE = 1, CODEC_FAILED = 11; // objects.RawReason
constexpr unsigned HEADER_NBYTES = 96, TABLE_ROW_NBYTES = 32;
constexpr unsigned PAYLOAD_ALIGN_NBYTES = 512, OBJECT_ALIGN_NBYTES = 4096;
constexpr unsigned VECTOR_NBYTES = 16;           // coded slices start and end on these
constexpr unsigned HEAD_WORDS = 3;               // of a payload, before the lengths
constexpr unsigned MOST_SLICE_NBYTES = 1u << 20; // that a decoder takes
constexpr unsigned MOST_WARPS = 32;              // of the block of ans_layout
constexpr unsigned PARTS = 4;                    // blocks of ans_pack that share a slice
constexpr unsigned LOADS = 4;                    // that one of its threads has in flight
constexpr unsigned CRC_POLYNOMIAL = 0xedb88320u;

// x^(8 * 2^k) modulo the polynomial: what 2^k zero bytes multiply a CRC register by.
__constant__ unsigned ZERO_BYTES[32] = {
    0x00800000u, 0x00008000u, 0xedb88320u, 0xb1e6b092u, 0xa06a2517u, 0xed627daeu, 0x88d14467u,
    0xd7bbfe6au, 0xec447f11u, 0x8e7ea170u, 0x6427800eu, 0x4d47bae0u, 0x09fe548fu, 0x83852d0fu,
    0x30362f1au, 0x7b5a9cc3u, 0x31fec169u, 0x9fec022au, 0x6c8dedc4u, 0x15d6874du, 0x5fde7a4eu,
    0xbad90e37u, 0x2e4e5eefu, 0x4eaba214u, 0xa8a472c0u, 0x429a969eu, 0x148d302au, 0xc40ba6d0u,
    0xc4e22c3cu, 0x40000000u, 0x20000000u, 0x08000000u,
};

__device__ inline Nbytes round_up(Nbytes nbytes, unsigned alignment) {
    return (nbytes + alignment - 1) / alignment * alignment;
}

// Bytes before the first coded slice: three words, the lengths, zeros to a multiple of 16.
__device__ inline unsigned head_nbytes(unsigned slices) {
    return (4 * (HEAD_WORDS + slices) + VECTOR_NBYTES - 1) / VECTOR_NBYTES * VECTOR_NBYTES;
}

// Offset of an object's first payload.
__device__ inline Nbytes table_end(unsigned segments) {
    return round_up(HEADER_NBYTES + Nbytes(TABLE_ROW_NBYTES) * segments, PAYLOAD_ALIGN_NBYTES);
}

__device__ inline bool saves_too_little(Nbytes stored_nbytes, Nbytes original_nbytes) {
    return 8 * round_up(stored_nbytes, PAYLOAD_ALIGN_NBYTES) >
           7 * round_up(original_nbytes, PAYLOAD_ALIGN_NBYTES);
}

// Sum over the lanes up to this one; the whole warp must call it.
__device__ inline Nbytes sum_so_far(Nbytes own, unsigned lane) {
    for (unsigned step = 1; step < WARP; step *= 2) {
        const Nbytes before = __shfl_up_sync(ALL_LANES, own, step);
        if (lane >= step) {
            own += before;
        }
    }
    return own;
}

__device__ inline unsigned times(unsigned first, unsigned second) {
    unsigned product = 0;
    for (unsigned bit = 0; bit < 32; ++bit) {
        product ^= second & (0u - (first >> 31));
        first <<= 1;
        second = second >> 1 ^ (CRC_POLYNOMIAL & (0u - (second & 1)));
    }
    return product;
}

__device__ inline unsigned zeros_crc32(unsigned nbytes) {
    unsigned crc = 0xffffffffu;
    for (unsigned k = 0; nbytes >> k && k < 32; ++k) {
        if (nbytes >> k & 1) {
            crc = times(ZERO_BYTES[k], crc);
        }
    }
    return ~crc;
}

// Whether nvCOMP says that it coded a slice, and within its room.
__device__ inline bool was_coded(Nbytes nbytes, int status, unsigned room_nbytes) {
    return status == 0 && 0 < nbytes && nbytes <= room_nbytes;
}

// Settle how a task is stored, by one thread. Its payload, if coded, would end at `end`.
__device__ inline void settle(Task &task, AnsResult &result, const AnsRow &row, Nbytes end,
                              bool failed) {
    unsigned reason = row.word >> 16 & 0xff;
    const bool wanted = row.word & 0xff;
    if (wanted && failed) {
        reason = CODEC_FAILED;
    } else if (wanted && saves_too_little(end, row.original_nbytes)) {
        reason = SAVES_TOO_LITTLE;
    }
    const bool raw = !wanted || reason;
    AnsResult settled = {};
    settled.format = raw ? FORMAT_RAW : FORMAT_ANS;
    settled.raw_reason = reason;
    result = settled;
    task.stored_nbytes = raw ? row.original_nbytes : unsigned(end);
}

// Choose ANS or raw for every task, and lay the objects out one behind the other from `output`.
// One block of whole warps. Fills in payload and stored_nbytes of the tasks.
//   offsets  uint32 a slice: of the coded slice in its payload
//   starts   uint64 a task: where the object starts whose first task it is
extern "C" __global__ void __launch_bounds__(MOST_WARPS *WARP)
    ans_layout(Task *tasks, const AnsRow *rows, const Nbytes *coded_nbytes, const int *statuses,
               unsigned *offsets, AnsResult *results, Address *starts, Address output,
               unsigned count) {
    __shared__ Nbytes sums[MOST_WARPS];
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;

    // A thread for each task of one slice, which most are, then a warp for each of the others.
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
        const AnsRow row = rows[i];
        const bool wanted = row.word & 0xff;
        if (wanted && row.slices > 1) {
            continue;
        }
        const Nbytes nbytes = wanted ? coded_nbytes[row.slice_first] : 0;
        const bool failed =
            wanted && !was_coded(nbytes, statuses[row.slice_first], row.room_nbytes);
        if (wanted) {
            offsets[row.slice_first] = head_nbytes(1);
        }
        settle(tasks[i], results[i], row, head_nbytes(1) + round_up(nbytes, VECTOR_NBYTES), failed);
    }
    for (unsigned i = warp; i < count; i += warps) {
        if (rows[i].slices == 1 || !(rows[i].word & 0xff)) {
            continue;
        }
        const AnsRow row = rows[i];
        Nbytes end = head_nbytes(row.slices);
        bool failed = false;
        for (unsigned first = 0; first < row.slices; first += WARP) {
            const unsigned slice = row.slice_first + first + lane;
            const bool mine = first + lane < row.slices;
            Nbytes nbytes = mine ? coded_nbytes[slice] : 0;
            if (mine && !was_coded(nbytes, statuses[slice], row.room_nbytes)) {
                failed = true;
                nbytes = 0;
            }
            const Nbytes step = round_up(nbytes, VECTOR_NBYTES);
            const Nbytes sum = sum_so_far(step, lane);
            if (mine) {
                offsets[slice] = unsigned(end + sum - step);
            }
            end += __shfl_sync(ALL_LANES, sum, WARP - 1);
        }
        failed = __any_sync(ALL_LANES, failed);
        if (lane == 0) {
            settle(tasks[i], results[i], row, end, failed);
        }
    }
    __syncthreads();

    for (unsigned i = warp; i < count; i += warps) {
        if (rows[i].object_first != i) {
            continue;
        }
        const unsigned segments = rows[i].object_count;
        Nbytes end = table_end(segments);
        for (unsigned first = 0; first < segments; first += WARP) {
            const unsigned j = i + first + lane;
            const bool mine = first + lane < segments;
            const Nbytes step = mine ? round_up(tasks[j].stored_nbytes, PAYLOAD_ALIGN_NBYTES) : 0;
            const Nbytes sum = sum_so_far(step, lane);
            if (mine) {
                tasks[j].payload = end + sum - step; // in its object, for now
            }
            end += __shfl_sync(ALL_LANES, sum, WARP - 1);
        }
        const unsigned object_nbytes = unsigned(round_up(end, OBJECT_ALIGN_NBYTES));
        for (unsigned j = lane; j < segments; j += WARP) {
            results[i + j].object_nbytes = object_nbytes;
        }
    }
    __syncthreads();

    Address start = output;
    for (unsigned first = 0; first < count; first += blockDim.x) {
        const unsigned i = first + threadIdx.x;
        const Nbytes own = i < count && rows[i].object_first == i ? results[i].object_nbytes : 0;
        const Nbytes sum = sum_so_far(own, lane);
        if (lane == WARP - 1) {
            sums[warp] = sum;
        }
        __syncthreads();
        Nbytes before = 0, total = 0;
        for (unsigned other = 0; other < warps; ++other) {
            if (other < warp) {
                before += sums[other];
            }
            total += sums[other];
        }
        if (i < count) {
            starts[i] = start + before + sum - own;
        }
        start += total;
        __syncthreads();
    }
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
        tasks[i].payload += starts[rows[i].object_first];
    }
}

// Zero [from, to), both multiples of 16, by the whole block.
__device__ inline void clear(Address from, Address to) {
    for (Address at = from + VECTOR_NBYTES * threadIdx.x; at < to;
         at += VECTOR_NBYTES * blockDim.x) {
        *reinterpret_cast<uint4 *>(at) = make_uint4(0, 0, 0, 0);
    }
}

// Copy one of the PARTS of [source, source + nbytes) by the whole block. The last part brings zeros
// to the next multiple of 16 as well; nothing behind the source is read.
__device__ inline void copy_part(Address target, Address source, unsigned nbytes, unsigned part) {
    const unsigned vectors = nbytes / VECTOR_NBYTES, share = (vectors + PARTS - 1) / PARTS;
    const unsigned end = min(vectors, share * (part + 1));
    const uint4 *from = reinterpret_cast<const uint4 *>(source);
    uint4 *to = reinterpret_cast<uint4 *>(target);
    for (unsigned first = share * part + threadIdx.x; first < end; first += LOADS * blockDim.x) {
        uint4 held[LOADS];
#pragma unroll
        for (unsigned load = 0; load < LOADS; ++load) {
            if (first + load * blockDim.x < end) {
                held[load] = from[first + load * blockDim.x];
            }
        }
#pragma unroll
        for (unsigned load = 0; load < LOADS; ++load) {
            if (first + load * blockDim.x < end) {
                to[first + load * blockDim.x] = held[load];
            }
        }
    }
    const unsigned rest = nbytes % VECTOR_NBYTES;
    if (part == PARTS - 1 && rest && threadIdx.x < VECTOR_NBYTES) {
        const unsigned at = vectors * VECTOR_NBYTES + threadIdx.x;
        reinterpret_cast<unsigned char *>(target)[at] =
            threadIdx.x < rest ? reinterpret_cast<const unsigned char *>(source)[at] : 0;
    }
}

// Write every payload to its place, zero all of its object that is not payload, and preset the
// CRCs. PARTS blocks a slice, those of raw segments too, and before them one for each blockDim.x
// tasks.
//   owners   uint32 a slice: its task
//   targets  uint64 a slice: address of the coded slice
extern "C" __global__ void __launch_bounds__(256)
    ans_pack(const Task *tasks, const AnsRow *rows, const unsigned *owners, const Address *targets,
             const Nbytes *coded_nbytes, const unsigned *offsets, const AnsResult *results,
             const Address *starts, unsigned *crcs, unsigned count) {
    const unsigned presets = (count + blockDim.x - 1) / blockDim.x;
    if (blockIdx.x < presets) { // first, as they take longest
        const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < count) {
            crcs[i] = zeros_crc32(tasks[i].stored_nbytes);
        }
        return;
    }
    const unsigned slice = (blockIdx.x - presets) / PARTS, part = (blockIdx.x - presets) % PARTS;
    const unsigned i = owners[slice];
    const Address target = targets[slice];     // these three say nothing where a segment is raw,
    const Nbytes nbytes = coded_nbytes[slice]; // but need not wait until that is known
    const unsigned offset = offsets[slice];
    const AnsRow row = rows[i];
    const AnsResult result = results[i];
    const Address payload = tasks[i].payload;
    const unsigned index = slice - row.slice_first;
    if (result.format == FORMAT_RAW) {
        const unsigned begin = index * row.slice_nbytes;
        copy_part(payload + begin, row.address + begin,
                  min(row.slice_nbytes, row.original_nbytes - begin), part);
    } else {
        copy_part(payload + offset, target, unsigned(nbytes), part);
        if (index == 0 && part == 0) {
            unsigned *head = reinterpret_cast<unsigned *>(payload);
            for (unsigned at = threadIdx.x; at < head_nbytes(row.slices) / 4; at += blockDim.x) {
                const unsigned length = at - HEAD_WORDS; // huge for the words before the lengths
                head[at] = at == 0               ? row.slices
                           : at == 1             ? row.slice_nbytes
                           : at == 2             ? row.word & 0xffff
                           : length < row.slices ? unsigned(coded_nbytes[row.slice_first + length])
                                                 : 0;
            }
        }
    }
    if (index == 0 && part == 0 && i == row.object_first) {
        clear(starts[i], payload);
    }
    if (index == row.slices - 1 && part == PARTS - 1) {
        const Address end = payload + round_up(tasks[i].stored_nbytes, VECTOR_NBYTES);
        const bool last = i == row.object_first + row.object_count - 1;
        clear(end, last ? starts[row.object_first] + result.object_nbytes
                        : Address(round_up(end, PAYLOAD_ALIGN_NBYTES)));
    }
}

// Add the CRC of as many zero bytes to each CRC that is expected. A thread a task.
extern "C" __global__ void __launch_bounds__(256)
    ans_expect(const Task *tasks, unsigned *crcs, unsigned count) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        crcs[i] ^= zeros_crc32(tasks[i].stored_nbytes);
    }
}

// Read the payloads' heads, and tell nvCOMP what to decode. A warp a task. A payload with another
// CRC or a head that no encoder writes is a fault, and a spare is decoded in its place, as it is
// for slices that a payload has fewer than the encoder would have cut.
extern "C" __global__ void __launch_bounds__(256)
    ans_unpack(const Task *tasks, const AnsRow *rows, const unsigned *crcs, unsigned *faults,
               const AnsSpare *spares, Address *sources, Nbytes *source_nbytes, Address *targets,
               Nbytes *room_nbytes, unsigned count) {
    const unsigned lane = threadIdx.x % WARP, i = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (i >= count) {
        return;
    }
    const AnsRow row = rows[i];
    if (!(row.word & 0xff)) {
        return;
    }
    const Address payload = tasks[i].payload;
    const unsigned stored_nbytes = tasks[i].stored_nbytes;
    const unsigned *head = reinterpret_cast<const unsigned *>(payload);
    const unsigned *lengths = head + HEAD_WORDS;
    const bool read = crcs[i] == 0;
    bool stands = false;
    unsigned slices = 0, slice_nbytes = 0;
    if (read && stored_nbytes >= VECTOR_NBYTES) {
        slices = head[0];
        slice_nbytes = head[1];
        stands = head[2] == (row.word & 0xffff) && 0 < slices && slices <= row.slices &&
                 0 < slice_nbytes && slice_nbytes <= MOST_SLICE_NBYTES &&
                 slice_nbytes % VECTOR_NBYTES == 0 &&
                 slices == (row.original_nbytes + slice_nbytes - 1) / slice_nbytes &&
                 head_nbytes(slices) <= stored_nbytes;
    }
    if (stands) {
        Nbytes end = head_nbytes(slices);
        bool fits = true;
        for (unsigned first = 0; first < slices; first += WARP) {
            const bool mine = first + lane < slices;
            const Nbytes nbytes = mine ? lengths[first + lane] : 0;
            fits = fits && (!mine || nbytes);
            const Nbytes sum = sum_so_far(round_up(nbytes, VECTOR_NBYTES), lane);
            end += __shfl_sync(ALL_LANES, sum, WARP - 1);
        }
        stands = __all_sync(ALL_LANES, fits) && end == stored_nbytes;
    }
    if (read && !stands && lane == 0) {
        faults[i] |= UNDECODABLE;
    }

    const AnsSpare spare = spares[row.word >> 8 & 0xff];
    Nbytes end = head_nbytes(slices);
    for (unsigned first = 0; first < row.slices; first += WARP) {
        const unsigned index = first + lane, slice = row.slice_first + index;
        const bool given = stands && index < slices;
        const Nbytes nbytes = given ? lengths[index] : 0;
        const Nbytes step = round_up(nbytes, VECTOR_NBYTES);
        const Nbytes sum = sum_so_far(step, lane);
        if (given) {
            const unsigned begin = index * slice_nbytes;
            sources[slice] = payload + end + sum - step;
            source_nbytes[slice] = nbytes;
            targets[slice] = row.address + begin;
            room_nbytes[slice] = min(slice_nbytes, row.original_nbytes - begin);
        } else if (index < row.slices) {
            sources[slice] = spare.address;
            source_nbytes[slice] = spare.coded_nbytes;
            targets[slice] = spare.target;
            room_nbytes[slice] = spare.original_nbytes;
        }
        end += __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
}

// Find fault with tasks of which a slice did not decode to its exact length, and let all that were
// encoded name their decoded bytes as payload, so that they can be scattered as raw ones are.
// A warp a task.
extern "C" __global__ void __launch_bounds__(256)
    ans_judge(Task *tasks, const AnsRow *rows, unsigned *faults, const Nbytes *room_nbytes,
              const Nbytes *found_nbytes, const int *statuses, unsigned count) {
    const unsigned lane = threadIdx.x % WARP, i = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (i >= count) {
        return;
    }
    const AnsRow row = rows[i];
    if (!(row.word & 0xff)) {
        return;
    }
    bool stands = true;
    for (unsigned slice = row.slice_first + lane; slice < row.slice_first + row.slices;
         slice += WARP) {
        stands = stands && statuses[slice] == 0 && found_nbytes[slice] == room_nbytes[slice];
    }
    stands = __all_sync(ALL_LANES, stands);
    if (lane == 0) {
        if (!stands) {
            faults[i] |= UNDECODABLE;
        }
        tasks[i].payload = row.address;
        tasks[i].stored_nbytes = row.original_nbytes;
    }
}
