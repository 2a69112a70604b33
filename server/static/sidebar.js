// The list of conversations: open, rename, delete, export.

import { h, iconButton } from "./dom.js";
import * as store from "./store.js";
import { t } from "./texts.js";

export class Sidebar {
  constructor(list, search, actions) {
    this.list = list;
    this.search = search;
    this.actions = actions;
    search.addEventListener("input", () => this.show(this.current));
  }

  show(currentId) {
    this.current = currentId;
    const words = this.search.value.trim().toLowerCase();
    const found = store.all().filter((conversation) => !words || matches(conversation, words));
    const midnight = new Date().setHours(0, 0, 0, 0);
    const groups = [
      ["today", found.filter((conversation) => conversation.updated >= midnight)],
      ["earlier", found.filter((conversation) => conversation.updated < midnight)],
    ];
    const parts = groups
      .filter(([, members]) => members.length)
      .flatMap(([name, members]) => [
        h("li", { class: "group" }, t(name)),
        ...members.map((member) => this.entry(member)),
      ]);
    this.list.replaceChildren(...parts);
    if (words && !found.length) this.list.append(h("li", { class: "group" }, t("noMatches")));
  }

  entry(conversation) {
    const isCurrent = conversation.id === this.current;
    const open = h(
      "button",
      {
        type: "button",
        class: "conversation",
        "aria-current": isCurrent ? "page" : null,
        title: conversation.title,
        onclick: () => this.actions.open(conversation.id),
      },
      conversation.title || t("untitled"),
    );
    const item = h(
      "li",
      { class: isCurrent ? "is-current" : "" },
      open,
      h(
        "span",
        { class: "entry-tools" },
        iconButton("edit", t("rename"), () => this.rename(item, conversation), "small"),
        iconButton("save", t("export"), () => this.actions.export(conversation.id), "small"),
        iconButton("trash", t("remove"), () => this.actions.remove(conversation.id), "small"),
      ),
    );
    return item;
  }

  rename(item, conversation) {
    const input = h("input", {
      class: "field",
      value: conversation.title,
      "aria-label": t("rename"),
      maxlength: 120,
    });
    let isDone = false;
    const finish = (keeps) => {
      if (isDone) return;
      isDone = true;
      const title = input.value.trim();
      if (keeps && title) this.actions.rename(conversation.id, title);
      this.show(this.current);
    };
    input.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter" || event.key === "Escape") {
        event.stopPropagation();
        finish(event.key === "Enter");
      }
    });
    input.addEventListener("blur", () => finish(true));
    item.replaceChildren(input);
    input.select();
    input.focus();
  }
}

function matches(conversation, words) {
  if (conversation.title.toLowerCase().includes(words)) return true;
  return conversation.messages.some((message) => store.contentOf(message).toLowerCase().includes(words));
}
