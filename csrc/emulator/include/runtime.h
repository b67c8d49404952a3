// What a compiled shader calls in the emulator. Plain C, so that a shader compiled by any compiler can be loaded.
#pragma once

namespace emulator {

// The buffers and the position of one thread, from which the generated entry point makes the kernel's arguments.
constexpr unsigned most_buffers = 31;
struct Arguments {
  void* buffers[most_buffers];
  void* threadgroup_buffers[most_buffers];
  unsigned thread_position_in_grid[3];
  unsigned threadgroup_position_in_grid[3];
  unsigned thread_position_in_threadgroup[3];
  unsigned threads_per_threadgroup[3];
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
  unsigned thread_index_in_threadgroup[1];
  unsigned thread_index_in_simdgroup[1];
  unsigned simdgroup_index_in_threadgroup[1];
  unsigned threads_per_simdgroup[1];
  unsigned simdgroups_per_threadgroup[1];
};

struct Entry {
  const char* name;
  void (*run)(const Arguments&);
  bool apple_matrix_layout;  // else the layout is random
};

enum class Type { boolean, int8, uint8, int16, uint16, int32, uint32, int64, uint64, float16, bfloat16, float32 };

// Operations of a whole SIMD-group.
enum class Collective {
  sum,
  product,
  minimum,
  maximum,
  bit_and,
  bit_or,
  bit_xor,
  inclusive_sum,
  inclusive_product,
  exclusive_sum,
  exclusive_product,
  shuffle,
  shuffle_xor,
  shuffle_up,
  shuffle_down,
  rotate_up,
  rotate_down,
  fill_up,
  fill_down,
  ballot,
  first_lane
};

enum class Atomic { load, store, exchange, add, subtract, minimum, maximum, bit_and, bit_or, bit_xor };

}  // namespace emulator

#pragma GCC visibility push(default)
extern "C" {

// Both wait for all threads of the threadgroup, or of the SIMD-group. `flags` are mem_flags.
void metal_emulator_threadgroup_barrier(unsigned flags, const char* file, int line);
void metal_emulator_simdgroup_barrier(unsigned flags, const char* file, int line);

// The threadgroup's copy of the variable of declaration number `id`.
void* metal_emulator_threadgroup_variable(int id, const char* name, unsigned long bytes, unsigned long alignment);

// `count` components of `type` of every lane go in, and come out; `argument` is the lane or the distance. For a fill,
// `in` holds 2 * count components: the data, then the filling.
void metal_emulator_collective(emulator::Collective what, emulator::Type type, int count, const void* in, void* out,
                               unsigned argument, const char* name, const char* file, int line);

// An 8x8 matrix has two elements in each lane, in the layout of the launch.
void metal_emulator_matrix_fill(emulator::Type type, void* elements, float diagonal, float elsewhere, const char* file,
                                int line);
void metal_emulator_matrix_load(emulator::Type type, void* elements, emulator::Type memory_type, const void* memory,
                                unsigned long elements_per_row, unsigned long column, unsigned long row, bool transpose,
                                const char* file, int line);
void metal_emulator_matrix_store(emulator::Type type, const void* elements, emulator::Type memory_type, void* memory,
                                 unsigned long elements_per_row, unsigned long column, unsigned long row,
                                 bool transpose, const char* file, int line);
// d = a b + c, in float32, rounded once; c may be null.
void metal_emulator_matrix_multiply(emulator::Type d_type, void* d, emulator::Type a_type, const void* a,
                                    emulator::Type b_type, const void* b, emulator::Type c_type, const void* c,
                                    const char* file, int line);

// `operand` goes in; the value before comes out in `before`.
void metal_emulator_atomic(emulator::Atomic what, emulator::Type type, void* address, const void* operand, void* before,
                           const char* file, int line);
bool metal_emulator_compare_exchange(emulator::Type type, void* address, void* expected, const void* desired,
                                     const char* file, int line);

// Exponentials and logarithms are counted.
float metal_emulator_exp(float);
float metal_emulator_exp2(float);
float metal_emulator_exp10(float);
float metal_emulator_tanh(float);
float metal_emulator_log(float);
float metal_emulator_log2(float);
float metal_emulator_log10(float);
float metal_emulator_pow(float, float);
float metal_emulator_sin(float);
float metal_emulator_cos(float);
float metal_emulator_tan(float);
float metal_emulator_sinh(float);
float metal_emulator_cosh(float);
float metal_emulator_asin(float);
float metal_emulator_acos(float);
float metal_emulator_atan(float);
float metal_emulator_atan2(float, float);
float metal_emulator_asinh(float);
float metal_emulator_acosh(float);
float metal_emulator_atanh(float);
float metal_emulator_fmod(float, float);
float metal_emulator_fma(float, float, float);

}  // extern "C"
#pragma GCC visibility pop
