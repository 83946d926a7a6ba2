"""Completion scripts of bash, zsh and fish around one table of words."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

Table = Mapping[str, Sequence[str]]
HOW = {
    "bash": "With the package bash-completion, new shells use it; else add to ~/.bashrc: source {path}",
    "zsh": "Add to ~/.zshrc: fpath=({folder} $fpath); autoload -Uz compinit; compinit",
    "fish": "New shells use it.",
}
HEAD = "# kiloword {version}: written by `kiloword --install-completion {name}`, which also updates it"
BASH = """
_kiloword() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
  local verb="${{COMP_WORDS[1]}}" second="${{COMP_WORDS[2]}}" words=""
  COMPREPLY=()
  if [[ $cur == "=" ]]; then cur=""  # bash splits --flag=value
  elif [[ $prev == "=" ]]; then prev="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
  if (( COMP_CWORD == 1 )); then words="$(_kiloword_words "")"
  elif [[ $cur == -* ]]; then
    words="$(_kiloword_words "$verb") $(_kiloword_words "$verb $second" || _kiloword_words "$verb ${{second%%+*}}")"
  elif [[ $prev == --* ]] && (( COMP_CWORD > 2 )); then
    words="$(_kiloword_words "$verb $prev" || _kiloword_words "$prev")"
  elif (( COMP_CWORD == 2 )); then words="$(_kiloword_words "$verb :")"
  elif (( COMP_CWORD == 3 )); then words="$(_kiloword_words "$verb $second :")"; fi
  [[ -n $words ]] && COMPREPLY=($(compgen -W "$words" -- "$cur"))
  return 0
}}
complete -o default -o bashdefault -F _kiloword kiloword
"""
ZSH = """
_kiloword() {{
  local cur="$words[CURRENT]" prev="$words[CURRENT-1]" verb="$words[2]" second="$words[3]" found=""
  if [[ $cur == --*=* ]]; then prev="${{cur%%=*}}"; compset -P '*='; cur=""; fi
  if (( CURRENT == 2 )); then found="$(_kiloword_words "")"
  elif [[ $cur == -* ]]; then
    found="$(_kiloword_words "$verb") $(_kiloword_words "$verb $second" || _kiloword_words "$verb ${{second%%+*}}")"
  elif [[ $prev == --* ]] && (( CURRENT > 3 )); then
    found="$(_kiloword_words "$verb $prev" || _kiloword_words "$prev")"
  elif (( CURRENT == 3 )); then found="$(_kiloword_words "$verb :")"
  elif (( CURRENT == 4 )); then found="$(_kiloword_words "$verb $second :")"; fi
  [[ -n ${{found// /}} ]] && compadd -- ${{=found}} && return
  _files
}}
if [[ $funcstack[1] == _kiloword ]]; then _kiloword "$@"; else compdef _kiloword kiloword; fi
"""
FISH = """
function __kiloword
    set -l cur (commandline -ct)
    set -l line (commandline -opc)
    set -l prev $line[-1]
    set -l verb $line[2]
    set -l second $line[3]
    set -l found
    switch (count $line)
        case 1
            set found (__kiloword_words "")
        case '*'
            if string match -q -- '-*' $cur
                set found (__kiloword_words "$verb") (__kiloword_words "$verb $second"
                    or __kiloword_words "$verb "(string replace -r '[+].*' '' -- "$second"))
            else if string match -q -- '--*' $prev; and test (count $line) -gt 2
                set found (__kiloword_words "$verb $prev"; or __kiloword_words "$prev")
            else if test (count $line) -eq 2
                set found (__kiloword_words "$verb :")
            else if test (count $line) -eq 3
                set found (__kiloword_words "$verb $second :")
            end
    end
    if test -n "$found"
        string split -n ' ' -- $found
    else
        __fish_complete_path $cur
    end
end
complete -c kiloword -e
complete -c kiloword -f -a '(__kiloword)'
"""


def bash(table: Table, version: str) -> str:
    """The script of bash, from version 3.2."""
    return _posix(table, HEAD.format(version=version, name="bash"), BASH)


def zsh(table: Table, version: str) -> str:
    """The script of zsh, a file of its fpath."""
    return _posix(table, "#compdef kiloword\n" + HEAD.format(version=version, name="zsh"), ZSH)


def fish(table: Table, version: str) -> str:
    """The script of fish."""
    cases = (
        f"        case {_quoted(key)}\n            echo {_quoted(' '.join(words))}" for key, words in table.items()
    )
    lookup = ["function __kiloword_words", "    switch $argv[1]", *cases, "        case '*'", "            return 1"]
    head = HEAD.format(version=version, name="fish")
    return "\n".join([head, *lookup, "    end", "end", FISH.strip(), ""])


def _posix(table: Table, head: str, rest: str) -> str:
    cases = (f"    {shlex.quote(key)}) echo {shlex.quote(' '.join(words))};;" for key, words in table.items())
    lookup = ["_kiloword_words() {", '  case "$1" in', *cases, "    *) return 1;;", "  esac", "}"]
    return "\n".join([head, *lookup, rest.format().strip(), ""])


def _quoted(text: str) -> str:
    """A string in fish's single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[Table, str], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
