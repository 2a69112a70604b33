// The messages of a conversation as nodes. Knows no network: what the buttons do is given as `actions`.

import { copyFrom, h, icon, iconButton } from "./dom.js";
import { update } from "./markdown.js";
import { number, t } from "./texts.js";

const NEAR_END = 80; // pixels

export class Thread {
  constructor(element, jump, actions) {
    this.element = element;
    this.list = h("div", { class: "messages" });
    this.actions = actions;
    this.jump = jump;
    this.follows = true;
    this.live = null; // the message that streams: {message, body, foot, thoughts}
    element.addEventListener("scroll", () => this.noteScroll(), { passive: true });
    jump.addEventListener("click", () => this.scrollToEnd(true));
  }

  /** Shows the conversation; `isBusy` while its last message streams. */
  show(conversation, { isBusy, empty }) {
    this.conversation = conversation;
    this.live = null;
    const { messages } = conversation;
    this.list.replaceChildren(...messages.map((message, index) => this.build(message, index, isBusy)));
    this.element.replaceChildren(messages.length ? this.list : empty);
    this.scrollToEnd(false);
  }

  build(message, index, isBusy) {
    const isLast = index === this.conversation.messages.length - 1;
    if (message.role === "user") return this.buildUser(message, index, isBusy);
    const answer = message.answers[message.at];
    const body = h("div", { class: "markdown" });
    const foot = h("div", { class: "foot" });
    const thoughts = h(
      "details",
      { class: "thoughts", hidden: true },
      h("summary", {}, t("thinking")),
      h("div", { class: "markdown" }),
    );
    const article = h(
      "article",
      { class: "message assistant", "data-role": "assistant" },
      thoughts,
      body,
      foot,
    );
    const parts = { message, answer, body, foot, thoughts, article };
    if (isBusy && isLast) this.live = parts;
    this.fill(parts, { isBusy: isBusy && isLast, isLast, isLocked: isBusy });
    return article;
  }

  buildUser(message, index, isBusy) {
    const text = h("div", { class: "bubble" }, message.content);
    const tools = h("div", { class: "tools" });
    const copy = iconButton("copy", t("copy"), () => copyFrom(copy, message.content), "small");
    tools.append(copy);
    const isLastOfUser = index >= this.conversation.messages.length - 2;
    if (isLastOfUser && !isBusy)
      tools.append(iconButton("edit", t("edit"), () => this.edit(index), "small is-edit"));
    return h(
      "article",
      { class: "message user", "data-role": "user" },
      h("span", { class: "visually-hidden" }, t("you")),
      text,
      tools,
    );
  }

  /** Called for each frame while an answer streams. */
  refresh() {
    if (!this.live) return;
    const { live } = this;
    live.answer = live.message.answers[live.message.at];
    this.fill(live, { isBusy: true, isLast: true, isLocked: true });
    if (this.follows) this.scrollToEnd(false);
  }

  fill({ message, answer, body, foot, thoughts, article }, { isBusy, isLast, isLocked }) {
    article.classList.toggle("is-live", isBusy);
    article.setAttribute("aria-busy", String(isBusy));
    if (answer.reasoning) {
      thoughts.hidden = false;
      if (isBusy) thoughts.open = !answer.content;
      update(thoughts.lastChild, answer.reasoning);
    }
    update(body, answer.content);
    if (isBusy && !answer.content && !answer.reasoning) {
      body.blocks = [];
      body.replaceChildren(h("p", { class: "dots", title: t("waiting") }, h("i"), h("i"), h("i")));
    }
    foot.replaceChildren(...this.buildFoot(message, answer, { isBusy, isLast, isLocked }));
  }

  buildFoot(message, answer, { isBusy, isLast, isLocked }) {
    const parts = [];
    if (answer.error) parts.push(this.buildError(answer.error, isLast && !isLocked));
    const tools = h("div", { class: "tools" });
    if (!isBusy) {
      const copy = iconButton("copy", t("copy"), () => copyFrom(copy, answer.content), "small");
      tools.append(copy);
      if (isLast && !isLocked) {
        tools.append(iconButton("redo", t("regenerate"), () => this.actions.regenerate(), "small is-again"));
        if (answer.content)
          tools.append(
            iconButton("forward", t("continue"), () => this.actions.resume(), "small is-continue"),
          );
      }
      if (message.answers.length > 1) tools.append(this.buildChooser(message, isLocked));
    }
    const stats = describe(answer);
    if (stats.length)
      tools.append(h("span", { class: "stats", title: breakdown(answer.stats?.server) }, ...stats));
    parts.push(tools);
    return parts;
  }

  buildError(error, canRetry) {
    const text =
      error.code === "lost" || error.message === "lost"
        ? t("lost")
        : error.message === "unreachable"
          ? t("gone")
          : error.status === 429
            ? t("queueFull", { s: error.retryAfterS ?? 1 })
            : error.message;
    const retry =
      canRetry &&
      h(
        "button",
        { type: "button", class: "button small", onclick: () => this.actions.regenerate() },
        icon("redo"),
        t("resend"),
      );
    return h("div", { class: "error", role: "alert" }, h("span", {}, text), retry);
  }

  buildChooser(message, isLocked) {
    const step = (by) => this.actions.choose(message, message.at + by);
    const [before, after] = [
      iconButton("left", t("previous"), () => step(-1), "small"),
      iconButton("right", t("next"), () => step(1), "small"),
    ];
    before.disabled = isLocked || message.at === 0;
    after.disabled = isLocked || message.at === message.answers.length - 1;
    return h(
      "span",
      { class: "chooser" },
      before,
      t("of", { at: message.at + 1, all: message.answers.length }),
      after,
    );
  }

  /** The last message of the user as a form. */
  edit(index = this.conversation.messages.findLastIndex((message) => message.role === "user")) {
    const message = this.conversation.messages[index];
    if (!message) return;
    const area = h("textarea", {
      class: "field",
      rows: Math.min(12, message.content.split("\n").length + 1),
      "aria-label": t("edit"),
      value: message.content,
    });
    const leave = () => this.actions.redraw();
    const submit = () => area.value.trim() && this.actions.resend(index, area.value.trim());
    const form = h(
      "form",
      { class: "edit" },
      area,
      h(
        "div",
        { class: "row" },
        h("button", { type: "button", class: "button", onclick: leave }, t("cancel")),
        h("button", { type: "submit", class: "button primary" }, t("send")),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        leave();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        submit();
      }
    });
    this.list.children[index].replaceChildren(form);
    area.focus();
  }

  noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END;
    this.jump.hidden = this.follows;
  }

  scrollToEnd(isSmooth) {
    this.follows = true;
    this.jump.hidden = true;
    this.element.scrollTo({ top: this.element.scrollHeight, behavior: isSmooth ? "smooth" : "instant" });
  }
}

/** What stands below an answer: time to first token, rate, tokens, and why it ended unless it simply did. */
function describe(answer) {
  const { stats, finish } = answer;
  const parts = [];
  if (stats?.ttftMs != null)
    parts.push(
      t("ttft", {
        ms: stats.ttftMs < 1000 ? `${Math.round(stats.ttftMs)} ms` : `${number(stats.ttftMs / 1000, 1)} s`,
      }),
    );
  if (stats?.rate) parts.push(t("rate", { rate: number(stats.rate, stats.rate < 100 ? 1 : 0) }));
  if (stats?.tokens)
    parts.push(stats.tokens === 1 ? t("oneToken") : t("tokens", { count: number(stats.tokens) }));
  if (finish === "stopped" || finish === "length") parts.push(t(finish));
  return parts.map((part) => h("span", {}, part));
}

function breakdown(server) {
  if (!server || server.queue_ms == null) return null;
  const ms = (value) => number(value, 1);
  const { prompt, cached, preemptions } = server;
  return t("breakdown", {
    queue: ms(server.queue_ms),
    prefill: ms(server.prefill_ms),
    decode: ms(server.decode_ms),
    prompt,
    cached,
    preemptions,
  });
}
