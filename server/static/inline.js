// Markdown inside a line: emphasis, code, links. Text to nodes, never to HTML; linear in the length of the text.

import { h } from "./dom.js";

const MAX_DEPTH = 16;
const MAX_LINK = 2000; // characters that are searched for the end of a link
const BARE_URL = /^https?:\/\/[^\s<>"'`|\\^{}]+/;
const SPECIAL = /[\\`*_~[!<\nh]/g;

/** The URL, if a click on it can only open a page or a mail; else null. */
export function safeUrl(text) {
  let url;
  try {
    url = new URL(text);
  } catch {
    return null; // relative ones too: a model knows no page of this server
  }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

export function link(url, ...children) {
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow ugc" }, ...children);
}

/** Nodes of a text. `depth` counts nesting; beyond the limit marks stay text. */
export function inline(text, depth = 0) {
  return depth > MAX_DEPTH ? [text] : new Scanner(text, depth).run();
}

class Scanner {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.plain = "";
    this.nodes = [];
    this.hopeless = new Set(); // marks that no end was found for; none will be found further on either
  }

  run() {
    while (this.at < this.text.length) {
      SPECIAL.lastIndex = this.at;
      const next = SPECIAL.exec(this.text)?.index ?? this.text.length;
      this.plain += this.text.slice(this.at, next);
      this.at = next;
      if (next < this.text.length && !this.special(this.text[next])) {
        this.plain += this.text[this.at];
        this.at += 1;
      }
    }
    this.flush();
    return this.nodes;
  }

  flush() {
    if (this.plain) this.nodes.push(this.plain);
    this.plain = "";
  }

  push(node, end) {
    this.flush();
    this.nodes.push(node);
    this.at = end;
    return true;
  }

  /** Whether a construct begins here; if so it is taken. */
  special(character) {
    switch (character) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "*":
      case "_":
      case "~":
        return this.emphasis(character);
      case "[":
        return this.bracket(this.at);
      case "!":
        return this.text[this.at + 1] === "[" && this.bracket(this.at + 1);
      case "<":
        return this.autolink();
      case "h":
        return this.bare();
    }
    return this.push(h("br"), this.at + 1); // a line break is meant as one in a chat
  }

  escape() {
    const next = this.text[this.at + 1];
    if (!next || !/[!-/:-@[-`{-~]/.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  code() {
    const marks = /^`+/.exec(this.text.slice(this.at, this.at + 32))[0];
    if (this.hopeless.has(marks)) return this.skip(marks);
    let end = this.at + marks.length;
    for (;;) {
      end = this.text.indexOf(marks, end);
      if (end < 0) {
        this.hopeless.add(marks);
        return this.skip(marks);
      }
      let after = end + marks.length;
      if (this.text[after] !== "`") break;
      while (this.text[after] === "`") after += 1;
      end = after;
    }
    const body = this.text.slice(this.at + marks.length, end).replace(/\n/g, " ");
    const trimmed = /^ .*[^ ].* $/.test(body) ? body.slice(1, -1) : body;
    return this.push(h("code", {}, trimmed), end + marks.length);
  }

  skip(marks) {
    this.plain += marks;
    this.at += marks.length;
    return true;
  }

  emphasis(character) {
    const run = this.runLength(character, this.at);
    const size = character === "~" ? 2 : Math.min(run, 3);
    if (run < size || run > 3) return this.skip(character.repeat(run));
    const marks = character.repeat(size);
    const isWord = (index) => /[\p{L}\p{N}]/u.test(this.text[index] ?? " ");
    const opens = !/\s/.test(this.text[this.at + run] ?? " ") && !(character === "_" && isWord(this.at - 1));
    const end = opens && !this.hopeless.has(marks) ? this.closing(character, size, isWord) : -1;
    if (end < 0) {
      if (opens) this.hopeless.add(marks);
      return this.skip(character.repeat(run));
    }
    const children = inline(this.text.slice(this.at + size, end), this.depth + 1);
    const node =
      character === "~"
        ? h("del", {}, ...children)
        : size === 1
          ? h("em", {}, ...children)
          : size === 2
            ? h("strong", {}, ...children)
            : h("strong", {}, h("em", {}, ...children));
    return this.push(node, end + size);
  }

  closing(character, size, isWord) {
    let at = this.at + size;
    for (;;) {
      at = this.text.indexOf(character, at);
      if (at < 0) return -1;
      const run = this.runLength(character, at);
      const closes = run >= size && !/\s/.test(this.text[at - 1]) && !(character === "_" && isWord(at + run));
      const isOurs = run === size || (size === 2 && run === 3) || (size === 1 && run === 3);
      if (closes && isOurs) return at + run - size;
      at += run;
    }
  }

  runLength(character, start) {
    let end = start;
    while (this.text[end] === character) end += 1;
    return end - start;
  }

  /** `[label](target "title")`; pictures too, which are never fetched and become links. */
  bracket(start) {
    const labelEnd = this.matching(start, "[", "]");
    if (labelEnd < 0 || this.text[labelEnd + 1] !== "(") return false;
    const targetEnd = this.matching(labelEnd + 1, "(", ")");
    if (targetEnd < 0) return false;
    const target = this.text.slice(labelEnd + 2, targetEnd).trim();
    const url = safeUrl(target.split(/\s/, 1)[0].replace(/^<|>$/g, ""));
    if (!url) return false; // stays the text that it is
    const label = this.text.slice(start + 1, labelEnd);
    return this.push(link(url, ...(label ? inline(label, this.depth + 1) : [url])), targetEnd + 1);
  }

  matching(start, open, close) {
    let depth = 0;
    const limit = Math.min(this.text.length, start + MAX_LINK);
    for (let at = start; at < limit; at += 1) {
      if (this.text[at] === "\\") at += 1;
      else if (this.text[at] === open) depth += 1;
      else if (this.text[at] === close && --depth === 0) return at;
    }
    return -1;
  }

  autolink() {
    const end = this.text.indexOf(">", this.at);
    if (end < 0 || end - this.at > MAX_LINK) return false;
    const inside = this.text.slice(this.at + 1, end);
    const url = /^(https?:|mailto:)\S+$/.test(inside) ? safeUrl(inside) : null;
    return url ? this.push(link(url, inside), end + 1) : false;
  }

  bare() {
    const found = BARE_URL.exec(this.text.slice(this.at, this.at + MAX_LINK));
    if (!found) return false;
    let text = found[0].replace(/[.,;:!?*_~]+$/, "");
    if (text.endsWith(")") && !text.includes("(")) text = text.replace(/\)+$/, "");
    const url = safeUrl(text);
    return url ? this.push(link(url, text), this.at + text.length) : false;
  }
}
