#include "base/imports.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace ringdl {
namespace {

#if defined(__x86_64__)
bool is_import(uint64_t type) {
  return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT || type == R_X86_64_64;
}
#elif defined(__aarch64__)
bool is_import(uint64_t type) {
  return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT || type == R_AARCH64_ABS64;
}
#else
bool is_import(uint64_t) { return false; }
#endif

// A loaded library, as far as its imports go. Formats: the System V ABI, chapters 4 and 5.
class Library {
 public:
  explicit Library(const dl_phdr_info& its) : base_(its.dlpi_addr) {
    for (int i = 0; i < its.dlpi_phnum; ++i) {
      const auto& header = its.dlpi_phdr[i];
      if (header.p_type == PT_DYNAMIC) read_dynamic(header);
      if (header.p_type == PT_GNU_RELRO) {
        constants_ = {base_ + header.p_vaddr, base_ + header.p_vaddr + header.p_memsz};
      }
    }
  }

  // Where the library keeps the address of a function that it imports.
  std::vector<uintptr_t> places_of(std::string_view symbol) const {
    std::vector<uintptr_t> places;
    for (const auto& [first, count] : {calls_, others_}) {
      for (size_t i = 0; i < count; ++i) {
        if (!is_import(ELF64_R_TYPE(first[i].r_info))) continue;
        const auto& its = symbols_[ELF64_R_SYM(first[i].r_info)];
        if (symbol == names_ + its.st_name) places.push_back(base_ + first[i].r_offset);
      }
    }
    return places;
  }

  // Has a place be written to. False: the system refuses.
  bool open(uintptr_t place) const {
    return mprotect(page_of(place), page_bytes(), PROT_READ | PROT_WRITE) == 0;
  }

  // A call that runs meanwhile takes the old function or the new one.
  void write(uintptr_t place, void* function) const {
    __atomic_store_n(reinterpret_cast<void**>(place), function, __ATOMIC_RELEASE);
  }

  // As it was after loading: constant, or not.
  void close(uintptr_t place) const {
    const bool is_constant =
        place >= constants_.begin && place < constants_.end / page_bytes() * page_bytes();
    if (is_constant) mprotect(page_of(place), page_bytes(), PROT_READ);
  }

 private:
  struct Table {
    const Elf64_Rela* first = nullptr;
    size_t count = 0;
  };
  struct Range {
    uintptr_t begin = 0, end = 0;
  };

  static uintptr_t page_bytes() { return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)); }
  static void* page_of(uintptr_t place) {
    return reinterpret_cast<void*>(place / page_bytes() * page_bytes());
  }

  // The dynamic linker has made some of these entries addresses, and not others.
  template <class T>
  const T* at(uint64_t value) const {
    return reinterpret_cast<const T*>(value < base_ ? base_ + value : value);
  }

  void read_dynamic(const ElfW(Phdr) & header) {
    size_t relative = 0;  // they come first, and in large libraries there are millions
    for (auto* its = at<ElfW(Dyn)>(base_ + header.p_vaddr); its->d_tag != DT_NULL; ++its) {
      if (its->d_tag == DT_SYMTAB) symbols_ = at<ElfW(Sym)>(its->d_un.d_ptr);
      if (its->d_tag == DT_STRTAB) names_ = at<char>(its->d_un.d_ptr);
      if (its->d_tag == DT_JMPREL) calls_.first = at<Elf64_Rela>(its->d_un.d_ptr);
      if (its->d_tag == DT_PLTRELSZ) calls_.count = its->d_un.d_val / sizeof(Elf64_Rela);
      if (its->d_tag == DT_RELA) others_.first = at<Elf64_Rela>(its->d_un.d_ptr);
      if (its->d_tag == DT_RELASZ) others_.count = its->d_un.d_val / sizeof(Elf64_Rela);
      if (its->d_tag == DT_RELACOUNT) relative = its->d_un.d_val;
    }
    others_.first += relative;
    others_.count -= std::min(relative, others_.count);
  }

  const uintptr_t base_;
  Table calls_, others_;
  const ElfW(Sym) * symbols_ = nullptr;
  const char* names_ = nullptr;
  Range constants_;
};

struct Search {
  uintptr_t inside;
  std::span<const Import> imports;
  bool is_done = false;
};

int look(dl_phdr_info* its, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  const bool is_it = std::any_of(its->dlpi_phdr, its->dlpi_phdr + its->dlpi_phnum, [&](auto& part) {
    const uintptr_t begin = its->dlpi_addr + part.p_vaddr;
    return part.p_type == PT_LOAD && search.inside >= begin && search.inside < begin + part.p_memsz;
  });
  if (!is_it) return 0;
  const Library library(*its);
  std::vector<std::pair<uintptr_t, void*>> places;
  for (const Import& import : search.imports) {
    const std::vector<uintptr_t> found = library.places_of(import.symbol);
    if (found.empty()) return 1;
    for (const uintptr_t place : found) places.emplace_back(place, import.replacement);
  }
  const auto open = [&](const auto& each) { return library.open(each.first); };
  search.is_done = std::ranges::all_of(places, open);
  for (const auto& [place, function] : places) {
    if (search.is_done) library.write(place, function);
    library.close(place);
  }
  return 1;
}

}  // namespace

bool replace_imports(const void* inside, std::span<const Import> imports) {
  Search search{reinterpret_cast<uintptr_t>(inside), imports};
  dl_iterate_phdr(&look, &search);
  return search.is_done;
}

}  // namespace ringdl
