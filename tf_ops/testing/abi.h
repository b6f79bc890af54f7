// For tests of our own declarations of other libraries: whether a call that is compiled
// with our declaration is one that the library's own headers describe.
#pragma once

#include <type_traits>

namespace keras_hvd {

// Whether a parameter of the one type is passed as one of the other.
template <typename A, typename B>
struct PassesAs {
  static constexpr bool Value() {
    constexpr bool integers = (std::is_integral_v<A> || std::is_enum_v<A>) &&
                              (std::is_integral_v<B> || std::is_enum_v<B>);
    if constexpr (std::is_same_v<A, B>) {
      return true;
    } else if constexpr (integers) {
      return sizeof(A) == sizeof(B);
    } else if constexpr (std::is_class_v<A> && std::is_class_v<B>) {
      return sizeof(A) == sizeof(B) && alignof(A) == alignof(B) &&
             std::is_trivially_copyable_v<A> && std::is_trivially_copyable_v<B>;
    } else {
      return false;
    }
  }
};

// A structure behind a pointer may have another name, and need not be known.
template <typename A, typename B>
struct PassesAs<A*, B*> {
  static constexpr bool Value() {
    using ToA = std::remove_const_t<A>;
    using ToB = std::remove_const_t<B>;
    if constexpr (std::is_const_v<A> != std::is_const_v<B>) {
      return false;
    } else if constexpr (std::is_class_v<ToA> && std::is_class_v<ToB>) {
      return true;
    } else {
      return PassesAs<ToA, ToB>::Value();
    }
  }
};

template <typename A, typename... As, typename B, typename... Bs>
struct PassesAs<A (*)(As...), B (*)(Bs...)> {
  static constexpr bool Value() {
    if constexpr (sizeof...(As) != sizeof...(Bs)) {
      return false;
    } else {
      return PassesAs<A, B>::Value() && (PassesAs<As, Bs>::Value() && ...);
    }
  }
};

template <typename A, typename B>
inline constexpr bool kPassesAs = PassesAs<A, B>::Value();

}  // namespace keras_hvd
