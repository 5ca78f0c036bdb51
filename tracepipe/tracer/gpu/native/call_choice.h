// SPDX-License-Identifier: MIT
// Chooses by name which API calls are recorded: the rule that hooks/calls.py puts into a setting.
//
//   TRACEPIPE_GPU_CALLS   all, none, or lists of words: "keep=GetFunction,IpcGet only=Launch without=Get,Peek"
//
// A name that contains a word of `keep` is recorded. Any other is recorded if it contains a word of `only`,
// where there are such words, and none of `without`.
#pragma once
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "settings.h"

namespace tracepipe {

class CallChoice {
  public:
    void read_settings() {
        is_none_ = false, keep_.clear(), only_.clear(), without_.clear();
        const char *set = settings().get("TRACEPIPE_GPU_CALLS");
        std::string_view text = set ? set : "all";
        is_none_ = text == "none";
        for (std::string_view part : split(text, ' ')) {
            size_t equals = part.find('=');
            if (equals == part.npos) continue;
            std::string_view list = part.substr(0, equals), words = part.substr(equals + 1);
            auto &into = list == "keep" ? keep_ : list == "only" ? only_ : without_;
            for (std::string_view word : split(words, ',')) into.emplace_back(word);
        }
    }
    bool is_none() const { return is_none_; }
    bool takes(std::string_view function) const {
        if (is_none_) return false;
        if (has_any(function, keep_)) return true;
        return (only_.empty() || has_any(function, only_)) && !has_any(function, without_);
    }

  private:
    using Words = std::vector<std::string>;
    static std::vector<std::string_view> split(std::string_view text, char at) {
        std::vector<std::string_view> parts;
        for (size_t end; (end = text.find(at)) != text.npos; text.remove_prefix(end + 1))
            parts.push_back(text.substr(0, end));
        parts.push_back(text);
        return parts;
    }
    static bool has_any(std::string_view function, const Words &words) {
        for (const std::string &word : words)
            if (function.find(word) != function.npos) return true;
        return false;
    }
    bool is_none_ = false;
    Words keep_, only_, without_;
};

}  // namespace tracepipe
