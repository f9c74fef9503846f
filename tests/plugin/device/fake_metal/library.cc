// Metal source to pipelines: MTLCompileOptions, MTLLibrary, MTLFunctionConstantValues,
// MTLFunction, MTLComputePipelineState, MTLBinaryArchive. Nothing is compiled: a kernel of
// the source is found by its host_name among the software kernels of this build.
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>

#include "plugin/device/software/software_device.h"
#include "tests/plugin/device/fake_metal/fake_metal.h"
#include "tests/plugin/device/fake_metal/metal.h"

namespace fake {
namespace {

// ---- Reading Metal source ------------------------------------------------------------

bool IsWordCharacter(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Comments become spaces; lines and strings stay.
std::string WithoutComments(const std::string& source) {
  std::string text = source;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') {
      for (++i; i < text.size() && text[i] != '"' && text[i] != '\n'; ++i) i += text[i] == '\\';
    } else if (text.compare(i, 2, "//") == 0) {
      for (; i < text.size() && text[i] != '\n'; ++i) text[i] = ' ';
    } else if (text.compare(i, 2, "/*") == 0) {
      const size_t end = text.find("*/", i + 2);
      const size_t stop = end == std::string::npos ? text.size() : end + 2;
      for (; i < stop; ++i) text[i] = text[i] == '\n' ? '\n' : ' ';
      --i;
    }
  }
  return text;
}

// Blanks what `#ifdef __METAL_VERSION__` and the like leave out; other conditions are taken
// for true in both branches.
std::string ForMetal(const std::string& source) {
  std::string text = source;
  struct Condition {
    bool is_known;
    bool is_active;
  };
  std::vector<Condition> conditions;
  for (size_t i = 0, end; i < text.size(); i = end + 1) {
    end = std::min(text.find('\n', i), text.size());
    std::string line;
    for (size_t j = i; j < end; ++j) {
      if (std::isspace(static_cast<unsigned char>(text[j])) == 0) line += text[j];
    }
    if (line.compare(0, 3, "#if") == 0) {
      const bool positive = line == "#ifdef__METAL_VERSION__";
      const bool negative = line == "#ifndef__METAL_VERSION__";
      conditions.push_back({positive || negative, !negative});
    } else if (line == "#else" && !conditions.empty()) {
      Condition& last = conditions.back();
      if (last.is_known) last.is_active = !last.is_active;
    } else if (line.compare(0, 6, "#endif") == 0 && !conditions.empty()) {
      conditions.pop_back();
    } else if (std::any_of(conditions.begin(), conditions.end(),
                           [](const Condition& c) { return !c.is_active; })) {
      std::fill(text.begin() + static_cast<std::ptrdiff_t>(i),
                text.begin() + static_cast<std::ptrdiff_t>(end), ' ');
    }
  }
  return text;
}

std::string WithoutSpaces(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (!std::isspace(static_cast<unsigned char>(c))) result += c;
  }
  return result;
}

class SourceReader {
 public:
  explicit SourceReader(const std::string& source) : text_(ForMetal(WithoutComments(source))) {}

  // host name -> expression. An error, as the compiler's log would have it, if not empty.
  std::string Read(std::map<std::string, std::string>* kernels) {
    if (std::string error = CheckIncludes(); !error.empty()) return error;
    FindPlainKernels(kernels);
    return FindInstantiations(kernels);
  }

 private:
  std::string At(size_t position, const std::string& message) const {
    size_t line = 1, column = 1;
    for (size_t i = 0; i < position; ++i) {
      column = text_[i] == '\n' ? 1 : column + 1;
      line += text_[i] == '\n';
    }
    return "program_source:" + std::to_string(line) + ":" + std::to_string(column) + ": " +
           message + "\n";
  }

  // Metal finds its own headers and no file of ours.
  std::string CheckIncludes() const {
    for (size_t i = text_.find('#'); i != std::string::npos; i = text_.find('#', i + 1)) {
      size_t j = text_.find_first_not_of(" \t", i + 1);
      if (j == std::string::npos || text_.compare(j, 7, "include") != 0) continue;
      j = text_.find_first_not_of(" \t", j + 7);
      const size_t end = text_.find_first_of("\"> \n", j + 1);
      const std::string name = text_.substr(j + 1, end - j - 1);
      const bool is_metals = text_[j] == '<' && (name.compare(0, 6, "metal_") == 0 ||
                                                 name.compare(0, 5, "simd/") == 0);
      if (!is_metals) return At(j, "fatal error: '" + name + "' file not found");
    }
    return "";
  }

  // `[[kernel]] void name(` or `kernel void name(`, templates left out.
  void FindPlainKernels(std::map<std::string, std::string>* kernels) const {
    for (size_t i = text_.find("kernel"); i != std::string::npos; i = text_.find("kernel", i + 6)) {
      size_t start = i, end = i + 6;
      if (start >= 2 && text_.compare(start - 2, 2, "[[") == 0 &&
          text_.compare(end, 2, "]]") == 0) {
        start -= 2;
        end += 2;
      } else if ((start > 0 && IsWordCharacter(text_[start - 1])) || IsWordCharacter(text_[end])) {
        continue;
      }
      const std::string name = FunctionDefinedAt(end);
      if (name.empty()) continue;
      const size_t before = text_.find_last_not_of(" \t\n", start == 0 ? 0 : start - 1);
      const bool is_template = before != std::string::npos && text_[before] == '>';
      if (!is_template) (*kernels)[name] = name;
    }
  }

  // The name, if text_ has `void name(` at i.
  std::string FunctionDefinedAt(size_t i) const {
    i = text_.find_first_not_of(" \t\n", i);
    if (i == std::string::npos || text_.compare(i, 4, "void") != 0) return "";
    i = text_.find_first_not_of(" \t\n", i + 4);
    if (i == std::string::npos) return "";
    size_t end = i;
    while (end < text_.size() && IsWordCharacter(text_[end])) ++end;
    const size_t next = text_.find_first_not_of(" \t\n", end);
    return next != std::string::npos && text_[next] == '(' ? text_.substr(i, end - i) : "";
  }

  bool Defines(const std::string& function) const {
    for (size_t i = text_.find("void"); i != std::string::npos; i = text_.find("void", i + 4)) {
      if (FunctionDefinedAt(i) == function) return true;
    }
    return false;
  }

  // `template [[host_name("n")]] [[kernel]] decltype(e) e;`
  std::string FindInstantiations(std::map<std::string, std::string>* kernels) const {
    const std::string mark = "host_name(\"";
    for (size_t i = text_.find(mark); i != std::string::npos; i = text_.find(mark, i + 1)) {
      const size_t name_end = text_.find('"', i + mark.size());
      const size_t end = text_.find(';', i);
      if (name_end == std::string::npos || end == std::string::npos || end < name_end) {
        return At(i, "error: expected ';' after explicit instantiation");
      }
      const std::string name = text_.substr(i + mark.size(), name_end - i - mark.size());
      std::string rest = WithoutSpaces(text_.substr(name_end + 1, end - name_end - 1));
      for (const char* before : {")]]", "[[kernel]]", "kernel"}) {
        const size_t length = std::strlen(before);
        if (rest.compare(0, length, before) == 0) rest.erase(0, length);
      }
      const std::string type = "decltype(";
      const size_t middle = rest.size() < type.size() ? 0 : (rest.size() - type.size() - 1) / 2;
      const std::string expression = middle == 0 ? "" : rest.substr(rest.size() - middle);
      if (expression.empty() || rest != type + expression + ")" + expression) {
        return At(i, "error: expected decltype(f<...>) f<...> after [[host_name(\"" + name +
                         "\")]], but got '" + rest + "'");
      }
      const std::string function = expression.substr(0, expression.find('<'));
      if (!Defines(function)) {
        return At(
            i, "error: explicit instantiation of undefined function template '" + function + "'");
      }
      if (!kernels->emplace(name, expression).second) {
        return At(i, "error: redefinition of '" + name + "'");
      }
    }
    return "";
  }

  const std::string text_;
};

uint64_t Hash(const std::string& text) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

std::string Hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(value));
  return text;
}

// ---- Options and libraries -----------------------------------------------------------

void DefineCompileOptions(Class& c) {
  c.Allocates<CompileOptions>();
  c.On(
      "setLanguageVersion:",
      +[](CompileOptions* self, Selector*, uint64_t version) { self->language_version = version; });
  c.On(
      "languageVersion", +[](CompileOptions* self, Selector*) -> uint64_t {
        return self->language_version.value_or(kLanguageVersion3_1);
      });
  c.On(
      "setFastMathEnabled:",
      +[](CompileOptions* self, Selector*, bool yes) { self->fast_math = yes; });
  c.On("fastMathEnabled", +[](CompileOptions* self, Selector*) { return self->fast_math; });
}

Library* NewLibrary(Object* self, Selector* s, Object* source, Object* options, Object** error) {
  const auto* text = Argument<String>(self, s, "the source", source);
  if (text == nullptr) return nullptr;
  // nil is allowed by Metal, and means whatever language version and fast math.
  const auto* chosen = Argument<CompileOptions>(self, s, "the options", options);
  if (chosen == nullptr) return nullptr;
  if (chosen->language_version != kLanguageVersion3_1) {
    Fault(MethodName(self, s) + ": the language version must be set to 3.1 (0x30001), but " +
          (chosen->language_version ? "is " + std::to_string(*chosen->language_version)
                                    : std::string("is not set")) +
          ".");
    return nullptr;
  }
  if (chosen->fast_math) {
    Fault(MethodName(self, s) + ": fast math is on: kernels with NaN and infinity need it off.");
    return nullptr;
  }
  std::map<std::string, std::string> kernels;
  const std::string log = SourceReader(text->text).Read(&kernels);
  if (!log.empty()) {
    SetError(error, kLibraryErrors, kCompileFailure, "Compilation failed: \n\n" + log);
    return nullptr;
  }
  auto* library = Make<Library>();
  library->source_hash = Hash(text->text);
  library->kernels = std::move(kernels);
  return library;
}

// ---- Function constants --------------------------------------------------------------

size_t SizeOf(uint64_t type) {
  switch (type) {
    case kTypeFloat:
    case kTypeInt:
    case kTypeUInt:
      return 4;
    case kTypeHalf:
    case kTypeShort:
    case kTypeUShort:
      return 2;
    case kTypeChar:
    case kTypeUChar:
    case kTypeBool:
      return 1;
    default:
      return 0;
  }
}

bool ReadConstant(const Object* self, const Selector* s, const void* data, uint64_t type,
                  ConstantValues::Value* value) {
  const size_t size = SizeOf(type);
  if (size == 0) {
    Fault(MethodName(self, s) + ": " + std::to_string(type) +
          " is no scalar MTLDataType that a function constant can have.");
    return false;
  }
  if (data == nullptr) {
    Fault(MethodName(self, s) + ": the value is NULL.");
    return false;
  }
  uint32_t bits = 0;
  std::memcpy(&bits, data, size);
  if (type == kTypeBool && bits > 1) {
    Fault(MethodName(self, s) + ": a bool must be the byte 0 or 1, but got " +
          std::to_string(bits) + ".");
    return false;
  }
  *value = {type, type == kTypeInt ? int64_t{static_cast<int32_t>(bits)} : int64_t{bits}};
  return true;
}

void DefineConstantValues(Class& c) {
  c.Allocates<ConstantValues>();
  c.On(
      "setConstantValue:type:atIndex:",
      +[](ConstantValues* self, Selector* s, const void* data, uint64_t type, uint64_t index) {
        if (index > 65535) {
          return Fault(MethodName(self, s) + ": index " + std::to_string(index) +
                       " is beyond 65535, the last one.");
        }
        ConstantValues::Value value;
        if (ReadConstant(self, s, data, type, &value)) self->by_index[index] = value;
      });
  c.On(
      "setConstantValue:type:withName:",
      +[](ConstantValues* self, Selector* s, const void* data, uint64_t type, Object* name) {
        const auto* text = Argument<String>(self, s, "the name", name);
        ConstantValues::Value value;
        if (text != nullptr && ReadConstant(self, s, data, type, &value)) {
          self->by_name[text->text] = value;
        }
      });
}

// Fills the function's constants. By index first, then by name; others are ignored.
bool Specialise(const Object* self, const Selector* s, const ConstantValues& values,
                Function* function) {
  const KernelFacts& kernel = *function->kernel;
  for (size_t i = 0; i < kernel.num_constants; ++i) {
    const KernelConstant& constant = kernel.constants[i];
    const ConstantValues::Value* value = nullptr;
    if (auto found = values.by_index.find(constant.index); found != values.by_index.end()) {
      value = &found->second;
    } else if (auto named = values.by_name.find(constant.name); named != values.by_name.end()) {
      value = &named->second;
    }
    const std::string what = MethodName(self, s) + ": " + kernel.host_name +
                             ": function constant '" + constant.name + "' (index " +
                             std::to_string(constant.index) + ")";
    if (value == nullptr) {
      Fault(what + " has no value.");
      return false;
    }
    if (value->type != constant.type) {
      Fault(what + " has MTLDataType " + std::to_string(constant.type) + ", but its value has " +
            std::to_string(value->type) + ".");
      return false;
    }
    function->constants[constant.index] = value->value;
  }
  function->complete = true;
  return true;
}

// ---- Functions -----------------------------------------------------------------------

const KernelFacts* FindKernel(const std::string& name) {
  for (size_t i = 0; i < kNumKernelFacts; ++i) {
    if (name == kKernelFacts[i].host_name) return &kKernelFacts[i];
  }
  return nullptr;
}

// One reference for the caller. Null, with a fault where it is the caller's.
Function* NewFunction(const Library* self, const Selector* s, Object* name,
                      const ConstantValues* values, Object** error) {
  const auto* text = Argument<String>(self, s, "the name", name);
  if (text == nullptr) return nullptr;
  const auto found = self->kernels.find(text->text);
  if (found == self->kernels.end()) {
    SetError(error, kLibraryErrors, kFunctionNotFound,
             "Function " + text->text + " was not found in the library");
    return nullptr;
  }
  const KernelFacts* kernel = FindKernel(text->text);
  if (kernel == nullptr) {
    Fault("the source has kernel '" + text->text +
          "', but this build of the fake has no software kernel for it.");
    return nullptr;
  }
  if (found->second != kernel->expression) {
    Fault("the source has '" + text->text + "' as " + found->second +
          ", but the software kernel of that name was made from " + kernel->expression + ".");
    return nullptr;
  }
  auto* function = Make<Function>();
  function->name = text->text;
  function->kernel = kernel;
  function->complete = kernel->num_constants == 0;
  if (values != nullptr && !Specialise(self, s, *values, function)) {
    SetError(error, kLibraryErrors, kCompileFailure,
             "Compilation failed: function constants of " + text->text + " have no valid value");
    Release(function, kExternal);
    return nullptr;
  }
  function->key = text->text;
  for (const auto& [index, value] : function->constants) {
    function->key += " " + std::to_string(index) + "=" + std::to_string(value);
  }
  function->key += " " + Hex(self->source_hash) + " " + FactText("name") + " " +
                   FactText("operatingSystemVersionString");
  return function;
}

void DefineLibrary(Class& c) {
  DefineLabelled(c);
  c.On(
      "functionNames", +[](Library* self, Selector*) {
        auto* array = Make<Array>();
        for (const auto& [name, expression] : self->kernels)
          array->items.emplace_back(NewText(name));
        return Autoreleased(array);
      });
  c.On(
      "newFunctionWithName:", +[](Library* self, Selector* s, Object* name) {
        return NewFunction(self, s, name, nullptr, nullptr);
      });
  c.On(
      "newFunctionWithName:constantValues:error:",
      +[](Library* self, Selector* s, Object* name, Object* values, Object** error) -> Function* {
        const auto* given = Argument<ConstantValues>(self, s, "the constant values", values);
        return given == nullptr ? nullptr : NewFunction(self, s, name, given, error);
      });
}

void DefineFunction(Class& c) {
  DefineLabelled(c);
  c.On("name", +[](Function* self, Selector*) { return NewText(self->name); });
  c.On("functionType", +[](Function*, Selector*) -> uint64_t { return 3; });  // kernel
}

// ---- Binary archives -----------------------------------------------------------------

constexpr char kArchiveStart[] = "FAKE METAL BINARY ARCHIVE 1\n";

bool ReadFile(const std::string& path, std::string* text) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return false;
  char part[4096];
  size_t got;
  while ((got = std::fread(part, 1, sizeof(part), file)) > 0) text->append(part, got);
  const bool ok = std::ferror(file) == 0;
  std::fclose(file);
  return ok;
}

bool ParseArchive(const std::string& text, std::set<std::string>* keys) {
  const size_t start = std::strlen(kArchiveStart);
  if (text.compare(0, start, kArchiveStart) != 0 || text.size() < start + 17) return false;
  const std::string body = text.substr(0, text.size() - 17);
  if (text.substr(text.size() - 17) != Hex(Hash(body)) + "\n") return false;
  for (size_t i = start; i < body.size();) {
    const size_t end = body.find('\n', i);
    keys->insert(body.substr(i, end - i));
    i = end + 1;
  }
  return true;
}

BinaryArchive* NewArchive(Object* self, Selector* s, Object* descriptor, Object** error) {
  const auto* wanted = Argument<BinaryArchiveDescriptor>(self, s, "the descriptor", descriptor);
  if (wanted == nullptr) return nullptr;
  auto* archive = Make<BinaryArchive>();
  if (!wanted->url) return archive;  // a new, empty one
  std::string text;
  const bool is_read = ReadFile(wanted->url->path, &text);
  if (is_read && ParseArchive(text, &archive->keys)) return archive;
  Release(archive, kExternal);
  SetError(error, kArchiveErrors, kInvalidFile,
           is_read ? "Invalid archive file: " + wanted->url->path
                   : "Could not open the archive file: " + wanted->url->path);
  return nullptr;
}

void DefineArchiveDescriptor(Class& c) {
  c.Allocates<BinaryArchiveDescriptor>();
  c.On("url", +[](BinaryArchiveDescriptor* self, Selector*) { return Lent(self->url.get()); });
  c.On(
      "setUrl:", +[](BinaryArchiveDescriptor* self, Selector* s, Object* url) {
        bool ok;
        Url* given = OptionalArgument<Url>(self, s, "the URL", url, &ok);
        if (ok) self->url = Ref<Url>(given);
      });
}

// The function of a pipeline descriptor that is ready to be compiled; else null and a fault.
Function* ReadyFunction(const Object* self, const Selector* s, Function* function) {
  if (function == nullptr) {
    Fault(MethodName(self, s) + ": computeFunction must not be nil.");
  } else if (!function->complete) {
    Fault(MethodName(self, s) + ": " + function->name +
          " has function constants, but was made without their values.");
  } else {
    return function;
  }
  return nullptr;
}

void DefineArchive(Class& c) {
  DefineLabelled(c);
  c.On(
      "addComputePipelineFunctionsWithDescriptor:error:",
      +[](BinaryArchive* self, Selector* s, Object* descriptor, Object**) {
        const auto* wanted = Argument<PipelineDescriptor>(self, s, "the descriptor", descriptor);
        if (wanted == nullptr) return false;
        const Function* function = ReadyFunction(self, s, wanted->function.get());
        if (function == nullptr) return false;
        self->keys.insert(function->key);
        return true;
      });
  c.On(
      "serializeToURL:error:", +[](BinaryArchive* self, Selector* s, Object* url, Object** error) {
        const auto* target = Argument<Url>(self, s, "the URL", url);
        if (target == nullptr) return false;
        std::string text = kArchiveStart;
        for (const std::string& key : self->keys) text += key + "\n";
        text += Hex(Hash(text)) + "\n";
        std::FILE* file = std::fopen(target->path.c_str(), "wb");
        bool ok = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
        if (file != nullptr) ok = std::fclose(file) == 0 && ok;
        if (!ok) {
          SetError(error, kArchiveErrors, kArchiveInternal,
                   "Could not write the archive to " + target->path);
        }
        return ok;
      });
}

// ---- Pipelines -----------------------------------------------------------------------

struct Counts {
  int64_t compiled = 0;
  int64_t archived = 0;
};

// Protected by Bookkeeping.
Counts& counts() {
  static Counts& all = *new Counts;
  return all;
}

void DefinePipelineDescriptor(Class& c) {
  DefineLabelled(c);
  c.Allocates<PipelineDescriptor>();
  c.methods.erase(SelectorNamed("device"));
  c.On(
      "computeFunction",
      +[](PipelineDescriptor* self, Selector*) { return Lent(self->function.get()); });
  c.On(
      "setComputeFunction:", +[](PipelineDescriptor* self, Selector* s, Object* function) {
        bool ok;
        auto* given = OptionalArgument<Function>(self, s, "the function", function, &ok);
        if (ok) self->function = Ref<Function>(given);
      });
  c.On(
      "binaryArchives",
      +[](PipelineDescriptor* self, Selector*) { return Lent(self->archives.get()); });
  c.On(
      "setBinaryArchives:", +[](PipelineDescriptor* self, Selector* s, Object* archives) {
        bool ok;
        auto* given = OptionalArgument<Array>(self, s, "the archives", archives, &ok);
        if (!ok) return;
        for (size_t i = 0; given != nullptr && i < given->items.size(); ++i) {
          if (Argument<BinaryArchive>(self, s, "each archive", given->items[i].get()) == nullptr) {
            return;
          }
        }
        self->archives = Ref<Array>(given);
      });
  c.On(
      "setMaxTotalThreadsPerThreadgroup:",
      +[](PipelineDescriptor* self, Selector*, uint64_t count) { self->max_threads = count; });
  c.On(
      "maxTotalThreadsPerThreadgroup",
      +[](PipelineDescriptor* self, Selector*) { return self->max_threads; });
  c.On(
      "setThreadGroupSizeIsMultipleOfThreadExecutionWidth:",
      +[](PipelineDescriptor* self, Selector*, bool yes) { self->multiple_of_width = yes; });
}

bool IsArchived(const Array* archives, const std::string& key) {
  for (size_t i = 0; archives != nullptr && i < archives->items.size(); ++i) {
    if (static_cast<BinaryArchive*>(archives->items[i].get())->keys.count(key) != 0) return true;
  }
  return false;
}

PipelineState* NewPipeline(const Object* self, const Selector* s, const PipelineDescriptor& wanted,
                           uint64_t options, const void* reflection, Object** error) {
  const Function* function = ReadyFunction(self, s, wanted.function.get());
  if (function == nullptr) return nullptr;
  if ((options & ~kFailOnBinaryArchiveMiss) != 0 || reflection != nullptr) {
    Fault(MethodName(self, s) + ": the fake has no reflection; options " + std::to_string(options) +
          ".");
    return nullptr;
  }
  const bool is_archived = IsArchived(wanted.archives.get(), function->key);
  if (!is_archived && (options & kFailOnBinaryArchiveMiss) != 0) {
    SetError(error, kArchiveErrors, kArchiveMiss,
             "Function " + function->name + " was not found in the binary archives");
    return nullptr;
  }
  std::vector<jfm::FunctionConstant> constants;
  for (size_t i = 0; i < function->kernel->num_constants; ++i) {
    const KernelConstant& constant = function->kernel->constants[i];
    const auto type = constant.type == kTypeBool ? jfm::FunctionConstant::Type::kBool
                                                 : jfm::FunctionConstant::Type::kInt;
    constants.push_back({static_cast<uint16_t>(constant.index), type,
                         static_cast<int32_t>(function->constants.at(constant.index))});
  }
  auto software = jfm::SoftwareDevice().GetPipeline(function->name, constants);
  if (!software.ok()) {
    SetError(error, kLibraryErrors, kCompileFailure, software.status().message());
    return nullptr;
  }
  auto* pipeline = Make<PipelineState>();
  pipeline->label = wanted.label;
  pipeline->kernel = function->kernel;
  pipeline->constants = function->constants;
  pipeline->software = *software;
  pipeline->max_threads = wanted.max_threads != 0
                              ? wanted.max_threads
                              : static_cast<uint64_t>(Fact("maxTotalThreadsPerThreadgroup"));
  pipeline->multiple_of_width = wanted.multiple_of_width;
  Bookkeeping lock;
  ++(is_archived ? counts().archived : counts().compiled);
  return pipeline;
}

PipelineState* NewPipelineOfFunction(const Object* self, const Selector* s, Object* function,
                                     uint64_t options, const void* reflection, Object** error) {
  auto* given = Argument<Function>(self, s, "the function", function);
  if (given == nullptr) return nullptr;
  PipelineDescriptor wanted;  // an object on the stack: only we see it
  wanted.function = Ref<Function>(given);
  return NewPipeline(self, s, wanted, options, reflection, error);
}

void DefinePipelineState(Class& c) {
  DefineLabelled(c);
  c.methods.erase(SelectorNamed("setLabel:"));
  c.On(
      "maxTotalThreadsPerThreadgroup",
      +[](PipelineState* self, Selector*) { return self->max_threads; });
  for (const char* name : {"threadExecutionWidth", "staticThreadgroupMemoryLength"}) {
    c.On(
        name, +[](Object*, Selector* s) -> uint64_t {
          return static_cast<uint64_t>(Fact(s->name.c_str()));
        });
  }
}

const PublicClass classes[] = {
    PublicClass(&CompileOptions::TheClass), PublicClass(&ConstantValues::TheClass),
    PublicClass(&BinaryArchiveDescriptor::TheClass), PublicClass(&PipelineDescriptor::TheClass)};

}  // namespace

FAKE_CLASS(CompileOptions, "MTLCompileOptions", &DefineCompileOptions)
FAKE_CLASS(Library, "MTLLibrary", &DefineLibrary)
FAKE_CLASS(ConstantValues, "MTLFunctionConstantValues", &DefineConstantValues)
FAKE_CLASS(Function, "MTLFunction", &DefineFunction)
FAKE_CLASS(BinaryArchiveDescriptor, "MTLBinaryArchiveDescriptor", &DefineArchiveDescriptor)
FAKE_CLASS(BinaryArchive, "MTLBinaryArchive", &DefineArchive)
FAKE_CLASS(PipelineDescriptor, "MTLComputePipelineDescriptor", &DefinePipelineDescriptor)
FAKE_CLASS(PipelineState, "MTLComputePipelineState", &DefinePipelineState)

void DefineLibraryFactories(Class& c) {
  c.On("newLibraryWithSource:options:error:", &NewLibrary);
  c.On("newBinaryArchiveWithDescriptor:error:", &NewArchive);
  c.On(
      "newComputePipelineStateWithFunction:error:",
      +[](Object* self, Selector* s, Object* function, Object** error) {
        return NewPipelineOfFunction(self, s, function, 0, nullptr, error);
      });
  c.On(
      "newComputePipelineStateWithFunction:options:reflection:error:",
      +[](Object* self, Selector* s, Object* function, uint64_t options, void* reflection,
          Object** error) {
        return NewPipelineOfFunction(self, s, function, options, reflection, error);
      });
  c.On(
      "newComputePipelineStateWithDescriptor:options:reflection:error:",
      +[](Object* self, Selector* s, Object* descriptor, uint64_t options, void* reflection,
          Object** error) -> PipelineState* {
        const auto* wanted = Argument<PipelineDescriptor>(self, s, "the descriptor", descriptor);
        if (wanted == nullptr) return nullptr;
        return NewPipeline(self, s, *wanted, options, reflection, error);
      });
}

extern "C" {

FAKE_EXPORT int64_t fake_metal_compiled_pipelines() {
  Bookkeeping lock;
  return counts().compiled;
}

FAKE_EXPORT int64_t fake_metal_archived_pipelines() {
  Bookkeeping lock;
  return counts().archived;
}

}  // extern "C"

}  // namespace fake
