// The view of the server: a few figures, the KV cache as a field of small squares, and the last minutes as curves.

import { h, svg } from "./dom.js";
import { number, t } from "./texts.js";

const COLUMNS = 30;
const ROWS = 8;
const CELL = 10;
const [WIDTH, HEIGHT] = [300, 84];
const LENGTH = 300; // samples

export class ServerView {
  constructor(element) {
    this.element = element;
    this.about = null;
    this.last = null;
    this.history = {};
    this.build();
  }

  build() {
    const figure = (name) => {
      const value = h("strong", {}, "–");
      const note = h("small", {});
      return { node: h("div", { class: "figure" }, value, h("span", {}, t(name)), note), value, note };
    };
    this.figures = {
      running: figure("running"),
      waiting: figure("waitingRequests"),
      rate: figure("tokensPerS"),
      step: figure("stepTime"),
    };
    this.cells = Array.from({ length: COLUMNS * ROWS }, (_, index) => {
      const [x, y] = [Math.floor(index / ROWS) * CELL, (index % ROWS) * CELL];
      return svg("rect", {
        x: x + 0.75,
        y: y + 0.75,
        width: CELL - 1.5,
        height: CELL - 1.5,
        rx: 2,
        class: "is-free",
      });
    });
    this.blocks = svg(
      "svg",
      { viewBox: `0 0 ${COLUMNS * CELL} ${ROWS * CELL}`, class: "blocks", role: "img" },
      ...this.cells,
    );
    this.blocksText = h("p", { class: "quiet" });
    this.rate = chart(["generated", "prompt"]);
    this.load = chart(["running", "waiting"]);
    this.facts = h("dl", { class: "facts" });
    const key = (kind, name) => h("span", { class: `key is-${kind}` }, t(name));
    this.element.replaceChildren(
      h("div", { class: "figures" }, ...Object.values(this.figures).map(({ node }) => node)),
      h("h3", {}, t("kvBlocks")),
      this.blocks,
      h("p", { class: "keys" }, key("used", "used"), key("cached", "cached"), key("free", "free")),
      this.blocksText,
      h("h3", {}, t("rateChart", { minutes: 5 })),
      this.rate.node,
      h("p", { class: "keys" }, key("generated", "generated"), key("prompt", "prompt"), this.rate.peak),
      h("h3", {}, t("loadChart", { minutes: 5 })),
      this.load.node,
      h("p", { class: "keys" }, key("running", "running"), key("waiting", "waitingRequests"), this.load.peak),
      this.facts,
    );
    if (this.last) this.draw();
  }

  hello(about) {
    this.about = about;
    this.history = about.history;
  }

  stats(sample) {
    this.last = sample;
    const news = { ...sample, blocks_used: sample.blocks.used };
    for (const [name, values] of Object.entries(this.history)) {
      values.push(news[name]);
      if (values.length > LENGTH) values.shift();
    }
    if (!this.element.closest("[hidden]")) this.draw();
  }

  draw() {
    const { last, about, figures } = this;
    if (!last || !about) return;
    figures.running.value.textContent = number(last.running);
    figures.running.note.textContent = t("seats", { count: about.batch_size });
    figures.waiting.value.textContent = number(last.waiting);
    figures.rate.value.textContent = number(
      last.generated_tokens_per_s,
      last.generated_tokens_per_s % 1 && last.generated_tokens_per_s < 100 ? 1 : 0,
    );
    figures.step.value.textContent =
      last.step_ms === null ? "–" : `${number(last.step_ms, last.step_ms < 100 ? 1 : 0)} ms`;
    this.drawBlocks(last.blocks);
    const { history } = this;
    this.rate.draw([history.generated_tokens_per_s, history.prompt_tokens_per_s], 10);
    this.load.draw([history.running, history.waiting], 4);
    this.drawFacts();
  }

  drawBlocks({ used, cached, free }) {
    const all = used + cached + free;
    const share = (count) => (all ? Math.round((count / all) * this.cells.length) : 0);
    const usedCells = used ? Math.max(1, share(used)) : 0; // what is there shows
    const cachedCells = cached ? Math.max(1, share(cached)) : 0;
    this.cells.forEach((cell, index) => {
      cell.setAttribute(
        "class",
        index < usedCells ? "is-used" : index < usedCells + cachedCells ? "is-cached" : "is-free",
      );
    });
    const counts = {
      used: number(used),
      cached: number(cached),
      free: number(free),
      all: number(all),
      size: this.about.model?.block_size ?? "",
    };
    this.blocksText.textContent = t("blocksText", counts);
    this.blocks.setAttribute("aria-label", this.blocksText.textContent);
  }

  drawFacts() {
    const { last, about } = this;
    const facts = [
      ["generated", number(last.generated_tokens)],
      ["prompt", number(last.prompt_tokens)],
      ["cacheHits", number(last.cached_prompt_tokens)],
      ["finished", number(last.finished_requests)],
      ["preemptions", number(last.preemptions)],
    ];
    if (about.model) facts.push(["context", t("tokens", { count: number(about.model.max_model_len) })]);
    facts.push(["version", about.version]);
    this.facts.replaceChildren(
      ...facts.flatMap(([name, value]) => [h("dt", {}, t(name)), h("dd", {}, value)]),
    );
  }
}

/** A chart of two curves, newest at the right; the first is filled. */
function chart(names) {
  const area = svg("path", { class: `area is-${names[0]}` });
  const lines = names.map((name) => svg("path", { class: `line is-${name}` }));
  const grid = [0.25, 0.5, 0.75].map((part) =>
    svg("path", { class: "grid", d: `M0 ${HEIGHT * part}H${WIDTH}` }),
  );
  const node = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", preserveAspectRatio: "none", role: "img" },
    ...grid,
    area,
    ...lines,
  );
  const peak = h("span", { class: "peak" });
  const draw = (columns, least) => {
    const top = Math.max(least, ...columns.flat()) * 1.08;
    const paths = columns.map((values) => {
      const from = LENGTH - values.length;
      return values
        .map(
          (value, index) =>
            `${(((from + index) * WIDTH) / (LENGTH - 1)).toFixed(1)} ${(HEIGHT - (value / top) * (HEIGHT - 2)).toFixed(1)}`,
        )
        .join("L");
    });
    paths.forEach((path, index) => lines[index].setAttribute("d", path && `M${path}`));
    const start = (((LENGTH - columns[0].length) * WIDTH) / (LENGTH - 1)).toFixed(1);
    area.setAttribute("d", paths[0] && `M${start} ${HEIGHT}L${paths[0]}L${WIDTH} ${HEIGHT}Z`);
    const highest = Math.max(0, ...columns[0]);
    peak.textContent = t("peak", { value: number(highest, highest < 100 && highest % 1 ? 1 : 0) });
    node.setAttribute("aria-label", peak.textContent);
  };
  return { node, peak, draw };
}
