// 8x8 matrices spread over a SIMD-group, two elements in each lane.
#pragma once

namespace metal {

template <class T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8x8");
  static constexpr emulator::Type type = emulator::Kind<T>::type;

  // NaN until it is assigned.
  simdgroup_matrix() : elements(T(NAN)) {}
  // `diagonal` on the diagonal, zeros elsewhere.
  explicit simdgroup_matrix(T diagonal, EMULATOR_SITE) {
    metal_emulator_matrix_fill(type, &elements, float(diagonal), 0.0f, file, line);
  }

  // The layout of the launch determines which two elements these are.
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }

  vec<T, 2> elements;
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows>
inline simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value, EMULATOR_SITE) {
  simdgroup_matrix<T, Columns, Rows> result;
  metal_emulator_matrix_fill(result.type, &result.elements, float(value), float(value), file, line);
  return result;
}

template <class T, int Columns, int Rows>
inline void simdgroup_load(simdgroup_matrix<T, Columns, Rows>& matrix, const T* memory,
                           ulong elements_per_row = Columns, vec<ulong, 2> origin = 0, bool transpose = false,
                           EMULATOR_SITE) {
  metal_emulator_matrix_load(matrix.type, &matrix.elements, matrix.type, memory, elements_per_row, origin.x, origin.y,
                             transpose, file, line);
}

template <class T, int Columns, int Rows>
inline void simdgroup_store(const simdgroup_matrix<T, Columns, Rows>& matrix, T* memory,
                            ulong elements_per_row = Columns, vec<ulong, 2> origin = 0, bool transpose = false,
                            EMULATOR_SITE) {
  metal_emulator_matrix_store(matrix.type, &matrix.elements, matrix.type, memory, elements_per_row, origin.x, origin.y,
                              transpose, file, line);
}

template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                          EMULATOR_SITE) {
  metal_emulator_matrix_multiply(d.type, &d.elements, a.type, &a.elements, b.type, &b.elements, c.type, &c.elements,
                                 file, line);
}

template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, EMULATOR_SITE) {
  metal_emulator_matrix_multiply(d.type, &d.elements, a.type, &a.elements, b.type, &b.elements, d.type, nullptr, file,
                                 line);
}

}  // namespace metal
