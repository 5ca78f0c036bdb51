// SPDX-License-Identifier: MIT
// The settings of a library: the program's environment or, if the library was loaded into a running process,
// a text with a line NAME=VALUE for each setting.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>

namespace tracepipe {

class Settings {
  public:
    // From now on these settings replace the environment.
    void take(std::string_view text) {
        lines_.clear();
        for (size_t end; !text.empty(); text.remove_prefix(end < text.size() ? end + 1 : end)) {
            end = std::min(text.find('\n'), text.size());
            std::string_view line = text.substr(0, end);
            size_t equals = line.find('=');
            if (equals != line.npos) lines_[std::string(line.substr(0, equals))] = line.substr(equals + 1);
        }
        are_given_ = true;
    }
    // Null if there is no setting with that name.
    const char *get(const char *name) const {
        if (!are_given_) return secure_getenv(name);
        auto found = lines_.find(name);
        return found == lines_.end() ? nullptr : found->second.c_str();
    }

  private:
    bool are_given_ = false;
    std::map<std::string, std::string> lines_;
};

inline Settings &settings() {
    static Settings &only = *new Settings;
    return only;
}

}  // namespace tracepipe
