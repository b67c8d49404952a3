// launch() on an Apple GPU.
//
// The CPU and the GPU of a Mac share their memory, so XLA's buffers are handed to the GPU where they are. Metal wraps
// whole pages only: a buffer's range is rounded outwards to pages, and the kernel gets the offset of its beginning.
// Where Metal refuses to wrap a range, the buffer is copied.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <unistd.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "launch.h"

namespace jflash {

namespace {

std::string text(NSString* string) { return string == nil ? "no reason given" : string.UTF8String; }

std::string description(NSError* error) {
  return error == nil ? "Metal gives no reason" : text(error.localizedDescription);
}

NSString* string(std::string_view text) {
  return [[NSString alloc] initWithBytes:text.data() length:text.size() encoding:NSUTF8StringEncoding];
}

// The first GPU, its command queue and the kernels compiled for it. Made once, never destroyed.
class Gpu {
 public:
  static Gpu& instance() {
    static Gpu* gpu = new Gpu;
    return *gpu;
  }

  // Why there is no GPU that can run the kernels; empty if there is one.
  const std::string& failure() const { return failure_; }
  id<MTLDevice> device() const { return device_; }
  id<MTLCommandQueue> queue() const { return queue_; }

  // The compiled kernel, or nil and why not. Two threads that ask for the same new kernel may both compile it.
  id<MTLComputePipelineState> pipeline(std::string_view source, std::string_view entry, std::string& failure) {
    std::string key(entry);
    key += '\0';
    key += source;
    {
      const std::lock_guard lock(mutex_);
      const auto found = pipelines_.find(key);
      if (found != pipelines_.end()) return found->second;
    }
    id<MTLComputePipelineState> made = compile(source, entry, failure);
    if (made == nil) return nil;
    const std::lock_guard lock(mutex_);
    return pipelines_.emplace(std::move(key), made).first->second;
  }

 private:
  Gpu() {
    device_ = MTLCreateSystemDefaultDevice();
    if (device_ == nil) {
      failure_ = "this machine has no GPU that Metal can use.";
    } else if (![device_ supportsFamily:MTLGPUFamilyApple7]) {
      failure_ = "the GPU " + text(device_.name) + " has no SIMD-group matrices; an M1 or later has them.";
    } else {
      queue_ = [device_ newCommandQueue];
      if (queue_ == nil) failure_ = "Metal makes no command queue.";
    }
  }

  id<MTLComputePipelineState> compile(std::string_view source, std::string_view entry, std::string& failure) {
    NSString* code = string(source);
    NSString* name = string(entry);
    if (code == nil || name == nil) {
      failure = "the shader's text is not UTF-8.";
      return nil;
    }
    MTLCompileOptions* options = [MTLCompileOptions new];
    // Infinities are data here, so arithmetic must not assume their absence.
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 150000
    if (@available(macOS 15.0, *)) {
      options.mathMode = MTLMathModeSafe;
    } else {
      options.fastMathEnabled = NO;
    }
#else
    options.fastMathEnabled = NO;
#endif
#if __MAC_OS_X_VERSION_MAX_ALLOWED >= 140000
    // The first version with bfloat.
    if (@available(macOS 14.0, *)) options.languageVersion = MTLLanguageVersion3_1;
#endif
    NSError* error = nil;
    id<MTLLibrary> library = [device_ newLibraryWithSource:code options:options error:&error];
    if (library == nil) {
      failure = "the shader does not compile: " + description(error);
      return nil;
    }
    id<MTLFunction> function = [library newFunctionWithName:name];
    if (function == nil) {
      failure = "the shader has no kernel of this name.";
      return nil;
    }
    error = nil;
    id<MTLComputePipelineState> pipeline = [device_ newComputePipelineStateWithFunction:function error:&error];
    if (pipeline == nil) failure = "the kernel does not fit the GPU: " + description(error);
    return pipeline;
  }

  id<MTLDevice> device_ = nil;
  id<MTLCommandQueue> queue_ = nil;
  std::string failure_;
  std::mutex mutex_;
  std::unordered_map<std::string, id<MTLComputePipelineState>> pipelines_;
};

// A piece of the CPU's memory as the GPU sees it.
struct Binding {
  id<MTLBuffer> buffer = nil;
  NSUInteger offset = 0;
  bool copied = false;
};

// `with_contents`: a copy, if one is needed, has the contents of the memory.
Binding bind(id<MTLDevice> device, const Buffer& buffer, bool with_contents) {
  // Metal has no empty buffers; the kernel reads nothing from this one.
  if (buffer.bytes == 0) return {[device newBufferWithLength:16 options:MTLResourceStorageModeShared], 0, false};
  const auto page = static_cast<std::uintptr_t>(getpagesize());
  const auto address = reinterpret_cast<std::uintptr_t>(buffer.data);
  const std::uintptr_t begin = address / page * page, end = (address + buffer.bytes + page - 1) / page * page;
  id<MTLBuffer> wrapped = [device newBufferWithBytesNoCopy:reinterpret_cast<void*>(begin)
                                                    length:end - begin
                                                   options:MTLResourceStorageModeShared
                                               deallocator:nil];
  if (wrapped != nil) return {wrapped, address - begin, false};
  if (with_contents) {
    return {[device newBufferWithBytes:buffer.data length:buffer.bytes options:MTLResourceStorageModeShared], 0, true};
  }
  return {[device newBufferWithLength:buffer.bytes options:MTLResourceStorageModeShared], 0, true};
}

std::optional<std::string> run(const Launch& launch) {
  Gpu& gpu = Gpu::instance();
  if (!gpu.failure().empty()) return gpu.failure();
  std::string failure;
  id<MTLComputePipelineState> pipeline = gpu.pipeline(launch.source, launch.entry, failure);
  if (pipeline == nil) return failure;
  const NSUInteger threads = NSUInteger{launch.threads[0]} * launch.threads[1] * launch.threads[2];
  if (threads > pipeline.maxTotalThreadsPerThreadgroup) {
    return "it needs " + std::to_string(threads) + " threads in a threadgroup; on this GPU it can have " +
           std::to_string(pipeline.maxTotalThreadsPerThreadgroup) + ".";
  }
  if (pipeline.threadExecutionWidth != 32) return "the GPU's SIMD-groups do not have 32 threads.";
  if (launch.grid[0] == 0 || launch.grid[1] == 0 || launch.grid[2] == 0) return std::nullopt;

  std::vector<Binding> operands, results;
  for (const Buffer& operand : launch.operands) operands.push_back(bind(gpu.device(), operand, true));
  for (const Buffer& result : launch.results) {
    // A result that aliases an operand shares its memory, even if that is a copy.
    const Binding* alias = nullptr;
    for (std::size_t i = 0; i < operands.size(); ++i) {
      if (result.bytes > 0 && launch.operands[i].data == result.data) alias = &operands[i];
    }
    results.push_back(alias != nullptr ? *alias : bind(gpu.device(), result, false));
  }
  NSUInteger index = 0;
  id<MTLCommandBuffer> commands = [gpu.queue() commandBuffer];
  id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
  if (encoder == nil) return "Metal makes no command encoder.";
  [encoder setComputePipelineState:pipeline];
  bool out_of_memory = false;
  for (const auto* bindings : {&operands, &results}) {
    for (const Binding& binding : *bindings) {
      out_of_memory = out_of_memory || binding.buffer == nil;
      [encoder setBuffer:binding.buffer offset:binding.offset atIndex:index++];
    }
  }
  if (launch.parameter_bytes > 0) [encoder setBytes:launch.parameters length:launch.parameter_bytes atIndex:index];
  if (!out_of_memory) {
    [encoder dispatchThreadgroups:MTLSizeMake(launch.grid[0], launch.grid[1], launch.grid[2])
            threadsPerThreadgroup:MTLSizeMake(launch.threads[0], launch.threads[1], launch.threads[2])];
  }
  [encoder endEncoding];
  if (out_of_memory) return "there is no memory for a copy of its buffers.";
  [commands commit];
  [commands waitUntilCompleted];
  if (commands.status != MTLCommandBufferStatusCompleted) return "the GPU stopped: " + description(commands.error);

  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].copied) std::memcpy(launch.results[i].data, results[i].buffer.contents, launch.results[i].bytes);
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> launch(const Launch& launch) {
  // XLA's threads have no autorelease pool for the objects that Metal's methods return.
  @autoreleasepool {
    auto failure = run(launch);
    if (failure.has_value()) return "Metal kernel " + std::string(launch.entry) + ": " + *failure;
    return std::nullopt;
  }
}

const char* host() { return "metal"; }

}  // namespace jflash
