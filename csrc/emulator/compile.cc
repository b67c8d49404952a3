#include "compile.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

#include "translate.h"

extern char** environ;

namespace emulator {

namespace {

namespace fs = std::filesystem;

std::mutex mutex;
std::string cache_directory;
std::vector<std::string> clang;  // empty: there is none

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, '|');)
    if (!word.empty()) words.push_back(word);
  return words;
}

// With these flags every access to memory becomes a call, and the compiler adds no accesses of its own.
std::vector<std::string> compile_flags() {
  std::vector<std::string> flags = {"-std=c++20",
                                    "-O1",
                                    "-g1",
                                    "-gdwarf-4",
                                    "-fPIC",
                                    "-w",
                                    "-fno-exceptions",
                                    "-fno-rtti",
                                    "-fsigned-char",
                                    "-fsanitize=thread",
                                    "-fsanitize=bounds,alignment",
                                    "-ftrivial-auto-var-init=pattern",
                                    "-ffp-contract=off",
                                    "-fno-math-errno",
                                    "-fno-threadsafe-statics",
                                    "-fno-strict-aliasing",
                                    "-fstack-clash-protection"};
#if defined(__clang__)
  // Without these, clang reports a read that precedes a write to the same place as a part of the write.
  flags.insert(flags.end(), {"-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm",
                             "-tsan-instrument-read-before-write=1", "-fno-sanitize=null"});
#else
  flags.insert(flags.end(), {"--param", "tsan-instrument-func-entry-exit=0", "-fexcess-precision=16"});
#endif
#if defined(__x86_64__)
  // Conversions of half in one instruction, where the CPU has it and the system keeps its registers.
  unsigned a, b, c = 0, d;
  constexpr unsigned needed = bit_F16C | bit_AVX | bit_OSXSAVE;
  if (__get_cpuid(1, &a, &b, &c, &d) != 0 && (c & needed) == needed) flags.push_back("-mf16c");
#endif
  return flags;
}

std::vector<std::string> compiler() { return words_of(METAL_EMULATOR_COMPILER); }

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// This library: a shader is linked against it, and its headers lie beside it.
fs::path library() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&metal_emulator_exp), &info);
  return fs::absolute(info.dli_fname);
}

fs::path headers() { return library().parent_path() / "metal_emulator"; }

// Two FNV-1a hashes side by side.
class Hash {
 public:
  void add(std::string_view text) {
    for (const char c : text) {
      a_ = (a_ ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
      b_ = (b_ ^ static_cast<unsigned char>(c)) * 0x10000000233u;
    }
    a_ = (a_ ^ 0x100) * 0x100000001b3u;
    b_ = (b_ ^ 0x100) * 0x10000000233u;
  }
  std::string text() const {
    char out[33];
    std::snprintf(out, sizeof out, "%016llx%016llx", static_cast<unsigned long long>(a_),
                  static_cast<unsigned long long>(b_));
    return out;
  }

 private:
  std::uint64_t a_ = 0xcbf29ce484222325u, b_ = 0x6c62272e07bb0142u;
};

// A hash of everything beside the shader that determines the compiled code.
const std::string& environment_key() {
  static const std::string key = [] {
    Hash hash;
    for (const std::string& word : compiler()) hash.add(word);
    for (const std::string& flag : compile_flags()) hash.add(flag);
    for (const std::string& word : clang) hash.add(word);
    hash.add(library().string());
    std::map<std::string, std::string> files;
    for (const auto& file : fs::directory_iterator(headers())) files[file.path().filename()] = read_file(file.path());
    for (const auto& [name, text] : files) {
      hash.add(name);
      hash.add(text);
    }
    hash.add(METAL_EMULATOR_HASH);
    return hash.text();
  }();
  return key;
}

// Runs a program to its end, with its messages in `log`. Returns whether it succeeded.
bool succeeds(const std::vector<std::string>& command, const fs::path& log) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t child;
  const int spawned = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (spawned != 0)
    throw CompileError("The Metal emulator cannot start its C++ compiler " + command[0] + ": " +
                       std::strerror(spawned));
  int status;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status == 0;
}

[[noreturn]] void fail(const std::string& what, const fs::path& log) {
  throw CompileError(what + "\n" + read_file(log).substr(0, 8000));
}

void run(const std::vector<std::string>& command, const fs::path& log, const std::string& what) {
  if (!succeeds(command, log)) fail(what, log);
}

// Held by one process while it compiles one shader.
class FileLock {
 public:
  explicit FileLock(const fs::path& path) : file_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    if (file_ < 0) throw CompileError("The Metal emulator cannot write " + path.string() + ": " + std::strerror(errno));
    flock(file_, LOCK_EX);
  }
  ~FileLock() { close(file_); }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int file_;
};

// Whether all errors are copies of a struct out of another address space, which Metal allows.
bool only_copies(const std::string& errors) {
  const std::string start = ": error: ";
  for (std::size_t at = errors.find(start); at != std::string::npos;) {
    const std::size_t next = errors.find(start, at + 1);
    const std::string one = errors.substr(at, next - at);
    if (one.find("no matching constructor for initialization of") == std::string::npos ||
        one.find("(the implicit copy constructor) not viable: cannot bind reference in address space") ==
            std::string::npos)
      return false;
    at = next;
  }
  return errors.find(start) != std::string::npos;
}

void check_address_spaces(const std::string& preprocessed, const fs::path& cpp, const fs::path& log) {
  std::ofstream(cpp) << translate(preprocessed, Purpose::check_address_spaces);
  std::vector<std::string> look = clang;
  look.insert(look.end(), {"-x", "c++", "-std=c++2b", "-fsyntax-only", "-ferror-limit=0", "-fno-caret-diagnostics",
                           "-w", "-I" + headers().string(), cpp.string()});
  if (!succeeds(look, log) && !only_copies(read_file(log))) fail("Clang finds in the shader's address spaces:", log);
  fs::remove(cpp);
}

void compile(std::string_view source, const fs::path& directory, const fs::path& result) {
  const std::string stem = result.stem().string();
  const fs::path shader = directory / (stem + ".metal"), cpp = directory / (stem + ".cc"),
                 preprocessed = directory / (stem + ".ii"), object = directory / (stem + ".o"),
                 log = directory / (stem + ".log"), made = directory / (stem + ".new");
  std::ofstream(shader) << "#line 1 \"shader.metal\"\n" << without_metal_headers(source);
  std::vector<std::string> preprocess = compiler();
  preprocess.insert(preprocess.end(),
                    {"-E", "-w", "-x", "c++", "-std=c++20", "-D__METAL__=1", "-D__METAL_VERSION__=320",
                     "-D__METAL_EMULATOR__=1", shader.string(), "-o", preprocessed.string()});
  run(preprocess, log, "The shader does not pass the preprocessor:");
  const std::string text = read_file(preprocessed);
  std::ofstream(cpp) << translate(text, Purpose::run);
  std::vector<std::string> command = compiler();
  const auto flags = compile_flags();
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(), {"-I" + headers().string(), "-c", cpp.string(), "-o", object.string()});
  run(command, log, "The shader does not compile:");
  if (!clang.empty() && text.find("#pragma METAL_EMULATOR no_address_spaces") == std::string::npos)
    check_address_spaces(text, directory / (stem + ".spaces.cc"), log);
  command = compiler();
  // Without the sanitizers' runtime: this library defines the functions that instrumented code calls.
  command.insert(command.end(), {"-shared", "-O1", "-fno-sanitize=undefined", object.string(), library().string(),
                                 "-lm", "-o", made.string()});
  run(command, log, "The shader does not link:");
  fs::rename(made, result);
  for (const fs::path& path : {shader, preprocessed, cpp, object, log}) fs::remove(path);
}

LoadedShader open_shader(const fs::path& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw CompileError(std::string("The compiled shader cannot be loaded: ") + dlerror());
  LoadedShader loaded{static_cast<const Entry*>(dlsym(handle, "metal_emulator_entries")), 0, 0, path.string()};
  if (loaded.entries == nullptr) throw CompileError("The compiled shader has no table of kernels: " + path.string());
  struct Search {
    std::uintptr_t inside, begin, end;
  } search{reinterpret_cast<std::uintptr_t>(loaded.entries), 0, 0};
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& found = *static_cast<Search*>(data);
        std::uintptr_t end = info->dlpi_addr;
        for (int i = 0; i < info->dlpi_phnum; ++i)
          if (info->dlpi_phdr[i].p_type == PT_LOAD)
            end = std::max<std::uintptr_t>(end,
                                           info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
        if (found.inside < info->dlpi_addr || found.inside >= end) return 0;
        found.begin = info->dlpi_addr;
        found.end = end;
        return 1;
      },
      &search);
  loaded.begin = search.begin;
  loaded.end = search.end;
  return loaded;
}

}  // namespace

const Entry* LoadedShader::find(std::string_view name) const {
  for (const Entry* entry = entries; entry->name != nullptr; ++entry)
    if (name == entry->name) return entry;
  return nullptr;
}

void set_cache_directory(std::string directory) {
  const std::lock_guard lock(mutex);
  cache_directory = std::move(directory);
}

void set_clang(const std::string& command) {
  const std::lock_guard lock(mutex);
  clang = words_of(command);
}

const LoadedShader& load_shader(std::string_view source) {
  static std::map<std::string, LoadedShader> loaded;
  const std::lock_guard lock(mutex);
  Hash hash;
  hash.add(environment_key());
  hash.add(source);
  const std::string key = hash.text();
  if (const auto found = loaded.find(key); found != loaded.end()) return found->second;
  const fs::path directory = cache_directory, result = directory / (key + ".so");
  if (!fs::exists(result)) {
    std::error_code error;
    fs::create_directories(directory, error);
    if (error) throw CompileError("The Metal emulator cannot make " + directory.string() + ": " + error.message());
    const FileLock one_process(directory / (key + ".lock"));
    if (!fs::exists(result)) compile(source, directory, result);
  }
  return loaded.emplace(key, open_shader(result)).first->second;
}

}  // namespace emulator
