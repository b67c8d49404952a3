// How the generated entry points pass a kernel its arguments.
#pragma once

namespace emulator {

// Converts to the pointer or the reference that the kernel's parameter is.
struct Pointer {
  void* address;
  template <class T>
  operator T*() const {
    return static_cast<T*>(address);
  }
};
struct Reference {
  void* address;
  template <class T>
  operator T&() const {
    return *static_cast<T*>(const_cast<void*>(static_cast<const void*>(address)));
  }
};

// A position or a size as the scalar or vector type of the kernel's parameter.
template <class T>
inline T position(const unsigned* at) {
  if constexpr (Kind<T>::count == 1)
    return T(at[0]);
  else if constexpr (Kind<T>::count == 2)
    return T(at[0], at[1]);
  else
    return T(at[0], at[1], at[2]);
}

template <class T>
inline T& threadgroup_variable(int id, const char* name) {
  return *static_cast<T*>(metal_emulator_threadgroup_variable(id, name, sizeof(T), alignof(T)));
}

}  // namespace emulator
