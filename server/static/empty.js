// What stands in the place of messages before there are any: a greeting with ideas, or how far loading is.

import { h } from "./dom.js";
import { t } from "./texts.js";

const IDEAS = ["idea1", "idea2", "idea3", "idea4"];

export function buildEmpty(state, about, model, send) {
  if (state.phase === "loading") return buildLoading(state);
  const ideas = IDEAS.map((key) =>
    h("button", { type: "button", class: "idea", onclick: () => send(t(key)) }, t(key)),
  );
  const hasTemplate = about?.model?.has_chat_template !== false;
  return h(
    "div",
    { class: "empty" },
    h("img", { src: "static/icon.svg", alt: "", width: 56, height: 56, class: "wheel" }),
    h("h2", {}, t("greeting")),
    h(
      "p",
      { class: "quiet" },
      hasTemplate ? t("greetingText", { model: model ?? "…" }) : t("noTemplate"),
    ),
    hasTemplate && h("div", { class: "ideas" }, ...ideas),
  );
}

function buildLoading({ message, progress }) {
  return h(
    "div",
    { class: "empty" },
    h("img", { src: "static/icon.svg", alt: "", width: 56, height: 56, class: "wheel is-turning" }),
    h("h2", {}, t("loading")),
    h("p", { class: "quiet" }, t("loadingText")),
    h(
      "progress",
      progress === null
        ? { "aria-label": t("loading") }
        : { max: 1, value: progress, "aria-label": t("loading") },
    ),
    h("p", { class: "quiet" }, message ?? ""),
  );
}
