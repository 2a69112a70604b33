// Markdown blocks: headings, lists, tables, quotes, code. A model's text becomes nodes and nothing else; HTML in it stays
// text. `update` keeps the blocks that did not change, so that a stream does not disturb what is already read or selected.

import { copyFrom, h, iconButton } from "./dom.js";
import { inline } from "./inline.js";
import { t } from "./texts.js";

const MAX_DEPTH = 10;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/** Shows `text` in `container`. */
export function update(container, text) {
  const blocks = parse(text.split("\n"), 0);
  const shown = container.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && blocks[same].source === shown[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map((block) => build(block, 0)));
  container.blocks = blocks.map((block) => block.source);
}

function parse(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = readBlock(lines, at, depth);
    block.source = `${block.kind}\n${lines.slice(at, block.end).join("\n")}`;
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading)
    return { kind: "heading", level: heading[1].length, text: heading[2].replace(/ #+$/, ""), end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, at, depth);
  if (isTable(lines, at)) return readTable(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end += 1;
  return {
    kind: "paragraph",
    text: lines
      .slice(at, end)
      .map((part) => part.trim())
      .join("\n"),
    end,
  };
}

function interrupts(lines, at) {
  const line = lines[at];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(line)) || isTable(lines, at);
}

function readCode(lines, at, fence) {
  const [, marks, language] = fence;
  const indent = /^ */.exec(lines[at])[0].length;
  const strip = new RegExp(`^ {0,${indent}}`);
  const body = [];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const closing = lines[end].trim();
    if (closing.length >= marks.length && closing === marks[0].repeat(closing.length))
      return { kind: "code", language, text: body.join("\n"), end: end + 1 };
    body.push(lines[end].replace(strip, ""));
  }
  return { kind: "code", language, text: body.join("\n"), end };
}

function readQuote(lines, at, depth) {
  const inner = [];
  let end = at;
  while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !interrupts(lines, end))) {
    inner.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return { kind: "quote", blocks: parse(inner, depth + 1), end };
}

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  let isLoose = false;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (
      !item ||
      item[1].length > first[1].length + 3 ||
      /\d/.test(item[2]) !== isOrdered ||
      RULE.test(lines[end])
    )
      break;
    if (item[1].length < first[1].length) break;
    const body = readItem(lines, end, item);
    items.push(parse(body.lines, depth + 1));
    end = body.end;
    let next = end;
    while (next < lines.length && !lines[next].trim()) next += 1;
    if (next > end && next < lines.length && ITEM.test(lines[next])) {
      isLoose = true;
      end = next;
    }
  }
  return { kind: "list", isOrdered, start: parseInt(first[2], 10), items, isLoose, end };
}

/** The lines of one item without its indentation: what is indented, and lazy lines of its last paragraph. */
function readItem(lines, at, item) {
  const width = item[1].length + item[2].length + Math.min(Math.max(item[3].length, 1), 4);
  const indented = new RegExp(`^ {${Math.min(width, 2 + item[1].length)},}`);
  const body = [item[4]];
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (!line.trim()) {
      if (!indented.test(lines[end + 1] ?? "")) break;
      body.push("");
    } else if (indented.test(line)) body.push(line.replace(new RegExp(`^ {0,${width}}`), ""));
    else if (lines[end - 1].trim() && !interrupts(lines, end)) body.push(line.trim());
    else break;
    end += 1;
  }
  return { lines: body, end };
}

function isTable(lines, at) {
  return (
    lines[at].includes("|") &&
    at + 1 < lines.length &&
    lines[at + 1].includes("-") &&
    DELIMITERS.test(lines[at + 1]) &&
    cells(lines[at]).length === cells(lines[at + 1]).length
  );
}

function readTable(lines, at) {
  const align = cells(lines[at + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left",
  );
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) rows.push(cells(lines[end++]));
  return { kind: "table", head: cells(lines[at]), align, rows, end };
}

function cells(line) {
  const parts = [""];
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") parts[parts.length - 1] += text[++at];
    else if (text[at] === "|") parts.push("");
    else parts[parts.length - 1] += text[at];
  }
  return parts.map((part) => part.trim());
}

function build(block, depth) {
  switch (block.kind) {
    case "heading":
      return h(`h${Math.min(block.level + 1, 6)}`, {}, ...inline(block.text));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, ...block.blocks.map((inner) => build(inner, depth + 1)));
    case "list":
      return h(
        block.isOrdered ? "ol" : "ul",
        { start: block.isOrdered && block.start !== 1 ? block.start : null },
        ...block.items.map((item) => buildItem(item, block.isLoose, depth)),
      );
    case "table":
      return buildTable(block);
    case "code":
      return buildCode(block);
  }
  return h("p", {}, ...inline(block.text));
}

function buildItem(blocks, isLoose, depth) {
  const task = blocks[0]?.kind === "paragraph" ? /^\[([ xX])\] /.exec(blocks[0].text) : null;
  const nodes = blocks.flatMap((block, index) => {
    if (block.kind !== "paragraph" || isLoose) return [build(block, depth + 1)];
    const text = index === 0 && task ? block.text.slice(4) : block.text;
    return inline(text);
  });
  if (!task || isLoose) return h("li", {}, ...nodes);
  return h(
    "li",
    { class: "task" },
    h("input", { type: "checkbox", disabled: true, checked: task[1] !== " " }),
    ...nodes,
  );
}

function buildTable(block) {
  const row = (tag, texts) =>
    h(
      "tr",
      {},
      ...block.align.map((align, index) => h(tag, { class: `is-${align}` }, ...inline(texts[index] ?? ""))),
    );
  const table = h(
    "table",
    {},
    h("thead", {}, row("th", block.head)),
    h("tbody", {}, ...block.rows.map((texts) => row("td", texts))),
  );
  return h("div", { class: "table", tabindex: "0" }, table);
}

export function buildCode({ text, language }) {
  const button = iconButton("copy", t("copy"), () => copyFrom(button, text));
  return h(
    "div",
    { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, language || t("code")), button),
    h("pre", { tabindex: "0" }, h("code", {}, text)),
  );
}
