// Atomic variables in device and threadgroup memory; the only memory order is relaxed, as in the language.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;

}  // namespace metal

namespace emulator {

template <class T>
inline T atomically(Atomic what, const volatile metal::atomic<T>* object, T operand, const char* file, int line) {
  T before;
  metal_emulator_atomic(what, Kind<T>::type, const_cast<metal::atomic<T>*>(object), &operand, &before, file, line);
  return before;
}

}  // namespace emulator

namespace metal {

template <class T>
inline T atomic_load_explicit(const volatile atomic<T>* object, memory_order, EMULATOR_SITE) {
  return emulator::atomically(emulator::Atomic::load, object, T(0), file, line);
}
template <class T, class U>
inline void atomic_store_explicit(volatile atomic<T>* object, U desired, memory_order, EMULATOR_SITE) {
  T operand = T(desired);
  metal_emulator_atomic(emulator::Atomic::store, emulator::Kind<T>::type, const_cast<atomic<T>*>(object), &operand,
                        nullptr, file, line);
}
#define EMULATOR_ATOMIC(NAME, WHAT)                                                      \
  template <class T, class U>                                                            \
  inline T NAME(volatile atomic<T>* object, U operand, memory_order, EMULATOR_SITE) {    \
    return emulator::atomically(emulator::Atomic::WHAT, object, T(operand), file, line); \
  }
EMULATOR_ATOMIC(atomic_exchange_explicit, exchange)
EMULATOR_ATOMIC(atomic_fetch_add_explicit, add)
EMULATOR_ATOMIC(atomic_fetch_sub_explicit, subtract)
EMULATOR_ATOMIC(atomic_fetch_min_explicit, minimum)
EMULATOR_ATOMIC(atomic_fetch_max_explicit, maximum)
EMULATOR_ATOMIC(atomic_fetch_and_explicit, bit_and)
EMULATOR_ATOMIC(atomic_fetch_or_explicit, bit_or)
EMULATOR_ATOMIC(atomic_fetch_xor_explicit, bit_xor)
#undef EMULATOR_ATOMIC
template <class T, class U>
inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected, U desired, memory_order,
                                                  memory_order, EMULATOR_SITE) {
  T wanted = T(desired);
  return metal_emulator_compare_exchange(emulator::Kind<T>::type, const_cast<atomic<T>*>(object), expected, &wanted,
                                         file, line);
}

}  // namespace metal
