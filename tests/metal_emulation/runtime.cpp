// Runs kernels as fibers and watches every load and store they make.
//
// Kernels are compiled with -fsanitize=thread and linked without its library: the compiler then
// calls __tsan_read4(address) and the like before each access, and those are defined here. An
// access must lie on the fiber's stack, in a buffer of the launch, or in threadgroup memory (the
// kernel library's .bss); threadgroup memory that another thread touched since the last barrier
// is a race. The first fault ends the launch.

#include "runtime.hpp"

#include <csetjmp>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>

namespace emulation {
namespace {

constexpr unsigned kLanes = 32;
constexpr std::size_t kStackBytes = 128 * 1024;
constexpr std::size_t kGrain = 2;  // bytes of threadgroup memory that share a shadow entry

using Entry = void (*)(void**);

enum class State { ready, at_barrier, at_exchange, finished };

struct Fiber {
  Thread thread;
  State state;
  bool started;
  const char* file;
  int line;
  bool is_simd_barrier;
  bool unfenced;                // wrote exchanged memory since its last fence
  std::uint64_t exchange_epoch;  // of its last such write
  std::uint64_t value;
  std::uint64_t* values;
  ucontext_t context;
  jmp_buf resume;
};

enum Kind { kInput, kOutput, kExchanged };  // the last: threadgroups read what others wrote

struct Buffer {
  char* begin;
  std::size_t size;
  int kind;
};

// Who touched two bytes of threadgroup memory last. Epochs only grow: a barrier starts one.
struct Shadow {
  std::uint64_t write_epoch, read_epoch;
  std::uint64_t write_simd_epoch, read_simd_epoch;
  const void* write_pc;
  const void* read_pc;
  unsigned writer, reader;
  bool other_simdgroup_read, other_lane_read;
};

struct Machine {
  Entry entry;
  void** arguments;
  std::vector<Buffer> buffers;
  char* shared_begin;
  std::size_t shared_bytes;
  char* library_begin;
  std::vector<Shadow> shadow;
  std::vector<std::uint64_t> simd_epochs;
  std::uint64_t epoch;
  std::uint64_t count_epoch;  // of the threadgroup's last atomic, and who made it
  unsigned counter;
  bool counted, told;  // whether there was one, and a fence of that thread behind it
  std::vector<Fiber> fibers;
  char* stacks = nullptr;
  std::size_t num_stacks = 0;
  Fiber* current;
  jmp_buf scheduler;
  char* error;
  std::size_t error_bytes;
  const void* fault_pc;
  const void* other_pc;
  bool failed;
};

Machine machine;

unsigned simdgroup(const Fiber& fiber) { return fiber.thread.index / kLanes; }

void leave() { _longjmp(machine.scheduler, 1); }

void fail(const char* format, ...) {
  if (!machine.failed) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(machine.error, machine.error_bytes, format, arguments);
    va_end(arguments);
    machine.failed = true;
  }
}

void fail_access(const void* pc, const void* other, const char* what) {
  const Thread& at = machine.current->thread;
  fail("%s; thread %u of threadgroup (%u, %u, %u)", what, at.index, at.group[0], at.group[1],
       at.group[2]);
  machine.fault_pc = pc;
  machine.other_pc = other;
  leave();
}

void run_fiber() {
  machine.entry(machine.arguments);
  machine.current->state = State::finished;
  machine.current->file = "";
  machine.current->line = 0;
  leave();
}

void resume(Fiber& fiber) {
  machine.current = &fiber;
  if (_setjmp(machine.scheduler)) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

void wait(State state, const char* file, int line) {
  Fiber& fiber = *machine.current;
  fiber.state = state;
  fiber.file = file;
  fiber.line = line;
  if (!_setjmp(fiber.resume)) leave();
}

// A race between the current thread and what the shadow remembers?
void check_shared(const char* address, std::size_t size, bool is_write, const void* pc) {
  const Fiber& fiber = *machine.current;
  const unsigned me = fiber.thread.index;
  const std::uint64_t simd_epoch = machine.simd_epochs[simdgroup(fiber)];
  const std::size_t begin = (address - machine.shared_begin) / kGrain;
  const std::size_t end = (address - machine.shared_begin + size - 1) / kGrain;
  for (std::size_t i = begin; i <= end; ++i) {
    Shadow& seen = machine.shadow[i];
    if (seen.write_epoch == machine.epoch && seen.writer != me &&
        (seen.writer / kLanes != simdgroup(fiber) || seen.write_simd_epoch == simd_epoch))
      fail_access(pc, seen.write_pc,
                  is_write ? "race: two threads write the same threadgroup memory"
                           : "race: threadgroup memory read that another thread wrote");
    const bool read_now = seen.read_epoch == machine.epoch;
    if (is_write) {
      const bool by_simdgroup = read_now && seen.reader / kLanes == simdgroup(fiber);
      const bool unordered = by_simdgroup && seen.read_simd_epoch == simd_epoch &&
                             (seen.reader != me || seen.other_lane_read);
      if (read_now && (seen.other_simdgroup_read || !by_simdgroup || unordered))
        fail_access(pc, seen.read_pc, "race: threadgroup memory written that another thread read");
      seen.write_epoch = machine.epoch;
      seen.write_simd_epoch = simd_epoch;
      seen.writer = me;
      seen.write_pc = pc;
      continue;
    }
    if (!read_now) {
      seen.other_simdgroup_read = seen.other_lane_read = false;
    } else if (seen.reader / kLanes != simdgroup(fiber)) {
      seen.other_simdgroup_read = true;
    } else if (seen.read_simd_epoch != simd_epoch) {
      seen.other_lane_read = false;
    } else if (seen.reader != me) {
      seen.other_lane_read = true;
    }
    seen.read_epoch = machine.epoch;
    seen.read_simd_epoch = simd_epoch;
    seen.reader = me;
    seen.read_pc = pc;
  }
}

// What threadgroups tell each other: written, fenced, behind a barrier counted by one thread, which
// fences again before anybody reads what others wrote.
void check_exchanged(bool is_write, const void* pc) {
  Fiber& fiber = *machine.current;
  if (!is_write) {
    if (!machine.told) fail_access(pc, nullptr, "race: exchanged memory read before a fence");
    return;
  }
  if (machine.counted && machine.count_epoch == machine.epoch &&
      machine.counter != fiber.thread.index)
    fail_access(pc, nullptr, "race: exchanged memory written that another thread counted");
  fiber.unfenced = true;
  fiber.exchange_epoch = machine.epoch;
}

// " (byte 132 of parameter 3, which has 128)" for an address near a buffer.
std::string nearest(const char* address) {
  constexpr std::ptrdiff_t kNear = 1 << 20;
  std::ptrdiff_t least = kNear;
  std::string found;
  for (const Buffer& buffer : machine.buffers) {
    const std::ptrdiff_t at = address - buffer.begin;
    const std::ptrdiff_t size = buffer.size;
    const std::ptrdiff_t distance = at < 0 ? -at : at - size;
    if (distance >= least) continue;
    least = distance;
    found = " (byte " + std::to_string(at) + " of parameter " +
            std::to_string(&buffer - machine.buffers.data()) + ", which has " +
            std::to_string(size) + ")";
  }
  return found;
}

void check(const void* where, std::size_t size, bool is_write, const void* pc) {
  if (!machine.current) return;
  const char* address = static_cast<const char*>(where);
  const std::size_t number = machine.current - machine.fibers.data();
  const char* stack = machine.stacks + number * kStackBytes;
  if (address >= stack && address + size <= stack + kStackBytes) return;
  for (const Buffer& buffer : machine.buffers) {
    if (address < buffer.begin || address + size > buffer.begin + buffer.size) continue;
    if (buffer.kind == kExchanged) return check_exchanged(is_write, pc);
    if (is_write != (buffer.kind == kOutput))
      fail_access(pc, nullptr, is_write ? "write to an input" : "read of an output");
    return;
  }
  const char* shared_end = machine.shared_begin + machine.shared_bytes;
  if (address >= machine.shared_begin && address + size <= shared_end)
    return check_shared(address, size, is_write, pc);
  if (!is_write && address >= machine.library_begin && address < machine.shared_begin) return;
  char what[100];
  std::snprintf(what, sizeof what, "%s out of bounds%s", is_write ? "write" : "read",
                nearest(address).c_str());
  fail_access(pc, nullptr, what);
}

void deliver(unsigned first, unsigned lanes) {
  std::uint64_t values[kLanes] = {};
  for (unsigned i = 0; i < lanes; ++i) values[i] = machine.fibers[first + i].value;
  if (machine.fibers[first].is_simd_barrier) ++machine.simd_epochs[first / kLanes];
  for (unsigned i = 0; i < lanes; ++i) {
    Fiber& fiber = machine.fibers[first + i];
    if (fiber.values) std::memcpy(fiber.values, values, sizeof values);
    fiber.state = State::ready;
  }
}

bool same_place(const Fiber& a, const Fiber& b) {
  return a.state == b.state && a.line == b.line && std::strcmp(a.file, b.file) == 0;
}

// Whether threads [first, first + count) all stand where the first of them does.
bool together(unsigned first, unsigned count) {
  for (unsigned i = 1; i < count; ++i)
    if (!same_place(machine.fibers[first], machine.fibers[first + i])) return false;
  return true;
}

void report_stuck() {
  for (const Fiber& fiber : machine.fibers) {
    if (fiber.state == State::finished) continue;
    const bool barrier = fiber.state == State::at_barrier;
    const unsigned first = barrier ? 0 : simdgroup(fiber) * kLanes;
    const unsigned all = machine.fibers.size() - first;
    const unsigned count = barrier ? all : (all < kLanes ? all : kLanes);
    unsigned here = 0, finished = 0;
    for (unsigned i = first; i < first + count; ++i) {
      here += machine.fibers[i].state != State::finished && same_place(fiber, machine.fibers[i]);
      finished += machine.fibers[i].state == State::finished;
    }
    if (here == count) continue;
    fail("%s at %s:%d reached by %u of %u threads of the %s, %u finished; threadgroup (%u, %u, %u)",
         barrier ? "barrier" : "simdgroup operation", fiber.file, fiber.line, here, count,
         barrier ? "threadgroup" : "simdgroup", finished, fiber.thread.group[0],
         fiber.thread.group[1], fiber.thread.group[2]);
    return;
  }
  fail("threads wait for each other");
}

// Runs simdgroup after simdgroup as far as it gets; false when the threadgroup is done or failed.
bool advance() {
  bool moved = false;
  const unsigned total = machine.fibers.size();
  for (unsigned first = 0; first < total; first += kLanes) {
    const unsigned lanes = total - first < kLanes ? total - first : kLanes;
    for (unsigned i = 0; i < lanes; ++i) {
      // Every other epoch backwards, so that an order nobody promised is not relied on.
      Fiber& fiber = machine.fibers[first + (machine.epoch % 2 ? lanes - 1 - i : i)];
      if (fiber.state != State::ready) continue;
      resume(fiber);
      moved = true;
      if (machine.failed) return false;
    }
    if (machine.fibers[first].state == State::at_exchange && together(first, lanes)) {
      deliver(first, lanes);
      moved = true;
    }
  }
  if (moved) return true;
  if (together(0, total) && machine.fibers[0].state == State::at_barrier) {
    ++machine.epoch;
    for (Fiber& fiber : machine.fibers) fiber.state = State::ready;
    return true;
  }
  for (const Fiber& fiber : machine.fibers)
    if (fiber.state != State::finished) {
      report_stuck();
      return false;
    }
  return false;
}

void prepare(const unsigned* size, const unsigned* num, unsigned x, unsigned y, unsigned z) {
  for (unsigned i = 0; i < machine.fibers.size(); ++i) {
    Fiber& fiber = machine.fibers[i];
    fiber.thread = Thread{{i % size[0], i / size[0] % size[1], i / size[0] / size[1]},
                          {x, y, z},
                          {size[0], size[1], size[2]},
                          {num[0], num[1], num[2]},
                          i};
    fiber.state = State::ready;
    fiber.started = false;
    fiber.unfenced = false;
    fiber.exchange_epoch = 0;
    fiber.file = "";
    fiber.line = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = machine.stacks + i * kStackBytes;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
}

void reserve_stacks(std::size_t count) {
  if (count <= machine.num_stacks) return;
  if (machine.stacks) munmap(machine.stacks, machine.num_stacks * kStackBytes);
  machine.stacks = static_cast<char*>(mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  machine.num_stacks = machine.stacks == MAP_FAILED ? 0 : count;
}

}  // namespace

extern "C" {

struct Request {
  Entry entry;
  void** arguments;  // the buffers, as the kernel's parameters
  const Buffer* buffers;
  std::size_t num_buffers;
  char* library_begin;
  char* shared_begin;
  char* shared_end;
  unsigned num_groups[3];
  unsigned group_size[3];
  char* error;
  std::size_t error_bytes;
  const void* fault_pc;  // out: the faulting access, and the one it races with
  const void* other_pc;
};

// 0, or 1 with the fault described in error. Outputs of a faulty launch mean nothing.
int emulation_run(Request* request) {
  const unsigned* size = request->group_size;
  const unsigned* num = request->num_groups;
  machine.entry = request->entry;
  machine.arguments = request->arguments;
  machine.buffers.assign(request->buffers, request->buffers + request->num_buffers);
  machine.library_begin = request->library_begin;
  machine.shared_begin = request->shared_begin;
  machine.shared_bytes = request->shared_end - request->shared_begin;
  machine.shadow.assign(machine.shared_bytes / kGrain + 1, Shadow{});
  machine.error = request->error;
  machine.error_bytes = request->error_bytes;
  machine.failed = false;
  machine.fault_pc = machine.other_pc = nullptr;
  machine.epoch = 1;
  const std::size_t total = std::size_t{size[0]} * size[1] * size[2];
  reserve_stacks(total);
  if (machine.num_stacks < total) fail("no memory for the stacks of %zu threads", total);
  machine.fibers.resize(total);
  machine.simd_epochs.assign(total / kLanes + 1, 1);
  for (unsigned z = 0; z < num[2]; ++z)
    for (unsigned y = 0; y < num[1]; ++y)
      for (unsigned x = 0; x < num[0] && !machine.failed; ++x) {
        // Threadgroup memory starts as NaN in every float type.
        std::memset(machine.shared_begin, 0xff, machine.shared_bytes);
        ++machine.epoch;
        machine.counted = machine.told = false;
        prepare(size, num, x, y, z);
        while (advance()) {
        }
      }
  machine.current = nullptr;
  request->fault_pc = machine.fault_pc;
  request->other_pc = machine.other_pc;
  return machine.failed;
}

const Thread* emulation_thread() { return &machine.current->thread; }

void emulation_barrier(const char* file, int line) { wait(State::at_barrier, file, line); }

void emulation_fence() {
  Fiber& fiber = *machine.current;
  fiber.unfenced = false;
  if (machine.counted && machine.counter == fiber.thread.index) machine.told = true;
}

unsigned emulation_count(unsigned* at, unsigned most) {
  const void* pc = __builtin_return_address(0);
  const Fiber& mine = *machine.current;
  bool found = false;
  for (const Buffer& buffer : machine.buffers)
    found = found || (buffer.kind == kExchanged && reinterpret_cast<char*>(at) >= buffer.begin &&
                      reinterpret_cast<char*>(at + 1) <= buffer.begin + buffer.size);
  if (!found) fail_access(pc, nullptr, "atomic outside of exchanged memory");
  for (const Fiber& fiber : machine.fibers) {
    if (fiber.unfenced) fail_access(pc, nullptr, "race: exchanged memory counted before a fence");
    if (&fiber != &mine && fiber.exchange_epoch == machine.epoch)
      fail_access(pc, nullptr, "race: exchanged memory written that another thread counted");
  }
  machine.counted = true;
  machine.told = false;
  machine.counter = mine.thread.index;
  machine.count_epoch = machine.epoch;
  const unsigned was = *at;
  *at = was >= most ? 0 : was + 1;
  return was;
}

void emulation_exchange(const char* file, int line, std::uint64_t mine, std::uint64_t* values) {
  Fiber& fiber = *machine.current;
  fiber.value = mine;
  fiber.values = values;
  fiber.is_simd_barrier = false;
  wait(State::at_exchange, file, line);
}

void emulation_simd_barrier(const char* file, int line) {
  Fiber& fiber = *machine.current;
  fiber.values = nullptr;
  fiber.is_simd_barrier = true;
  wait(State::at_exchange, file, line);
}

#define ACCESS(name, bytes, is_write) \
  void name(void* p) { check(p, bytes, is_write, __builtin_return_address(0)); }
#define ACCESSES(bytes)                                 \
  ACCESS(__tsan_read##bytes, bytes, false)              \
  ACCESS(__tsan_write##bytes, bytes, true)              \
  ACCESS(__tsan_unaligned_read##bytes, bytes, false)    \
  ACCESS(__tsan_unaligned_write##bytes, bytes, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range(void* p, std::size_t size) {
  check(p, size, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, std::size_t size) {
  check(p, size, true, __builtin_return_address(0));
}
// -fsanitize=alignment: a vector is read or written where it may not lie.
void __ubsan_handle_type_mismatch_v1(void*, void*) {
  fail_access(__builtin_return_address(0), nullptr, "misaligned access");
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}

}  // namespace emulation
