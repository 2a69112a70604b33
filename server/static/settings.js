// The form of sampling settings. An empty field follows the server, whose default shows in the empty field.

import { h } from "./dom.js";
import { number, t } from "./texts.js";

const NUMBERS = [
  {
    name: "temperature",
    text: "temperature",
    help: "temperatureHelp",
    min: 0,
    max: 2,
    step: 0.1,
    range: true,
  },
  { name: "top_p", text: "topP", min: 0, max: 1, step: 0.05, range: true },
  { name: "max_tokens", text: "maxTokens", min: 1, max: 2147483647, step: 1, empty: "maxTokensDefault" },
  {
    name: "seed",
    text: "seed",
    help: "seedHelp",
    min: 0,
    max: Number.MAX_SAFE_INTEGER,
    step: 1,
    empty: "seedDefault",
  },
];
const KEPT = ["system", "model"]; // when the rest is reset
const MORE = [
  { name: "top_k", text: "topK", min: 0, max: 2147483647, step: 1 },
  { name: "min_p", text: "minP", min: 0, max: 1, step: 0.01 },
  { name: "repetition_penalty", text: "repetition", min: 0.01, max: 10, step: 0.05 },
  { name: "presence_penalty", text: "presence", min: -2, max: 2, step: 0.1, empty: 0 },
  { name: "frequency_penalty", text: "frequency", min: -2, max: 2, step: 0.1, empty: 0 },
];

export class SettingsForm {
  constructor(element, onChange) {
    this.element = element;
    this.onChange = onChange;
  }

  /** Shows `settings`; `defaults` are the server's. */
  show(settings, defaults) {
    this.settings = settings;
    this.defaults = defaults;
    const reset = h(
      "button",
      { type: "button", class: "button", onclick: () => this.reset() },
      t("reset"),
    );
    this.element.replaceChildren(
      h("p", { class: "quiet" }, t("settingsScope")),
      this.textField("system", "system", { rows: 5, placeholder: t("systemPlaceholder") }),
      ...NUMBERS.map((field) => this.numberField(field)),
      h(
        "details",
        { class: "more" },
        h("summary", {}, t("more")),
        ...MORE.map((field) => this.numberField(field)),
        this.stopField(),
      ),
      reset,
    );
  }

  set(name, value) {
    if (value === "" || value === null) delete this.settings[name];
    else this.settings[name] = value;
    this.onChange();
  }

  reset() {
    for (const name of Object.keys(this.settings)) if (!KEPT.includes(name)) delete this.settings[name];
    this.onChange();
    this.show(this.settings, this.defaults);
  }

  numberField({ name, text, help, min, max, step, empty, range }) {
    const id = `setting-${name}`;
    const fallback = this.defaults[name] ?? empty ?? "";
    const shown =
      typeof fallback === "number" ? number(fallback, fallback % 1 ? 2 : 0) : fallback && t(fallback);
    const input = h("input", {
      id,
      class: "field",
      type: "number",
      inputmode: "decimal",
      min,
      max,
      step: "any",
      placeholder: shown,
      value: this.settings[name] ?? "",
      "aria-describedby": help ? `${id}-help` : null,
    });
    const slider =
      range &&
      h("input", {
        type: "range",
        min,
        max,
        step,
        tabindex: "-1",
        "aria-hidden": "true",
        value: this.settings[name] ?? (typeof fallback === "number" ? fallback : max),
      });
    const take = () => {
      const value = input.value === "" ? "" : Number(input.value);
      const isValid =
        value === "" || (value >= min && value <= max && (step !== 1 || Number.isInteger(value)));
      input.setAttribute("aria-invalid", String(!isValid));
      if (isValid) this.set(name, value);
      if (slider && isValid && value !== "") slider.value = value;
    };
    input.addEventListener("input", take);
    slider?.addEventListener("input", () => {
      input.value = slider.value;
      take();
    });
    return h(
      "div",
      { class: "setting" },
      h("label", { for: id }, t(text)),
      h("div", { class: "setting-inputs" }, slider, input),
      help && h("p", { class: "quiet", id: `${id}-help` }, t(help)),
    );
  }

  textField(name, text, properties) {
    const id = `setting-${name}`;
    const area = h("textarea", { id, class: "field", value: this.settings[name] ?? "", ...properties });
    area.addEventListener("input", () => this.set(name, area.value));
    return h("div", { class: "setting wide" }, h("label", { for: id }, t(text)), area);
  }

  stopField() {
    const area = h("textarea", {
      id: "setting-stop",
      class: "field",
      rows: 2,
      value: (this.settings.stop ?? []).join("\n"),
      placeholder: t("stopHelp"),
    });
    area.addEventListener("input", () => {
      const lines = area.value.split("\n").filter((line) => line);
      this.set("stop", lines.length ? lines.slice(0, 16) : null);
    });
    return h("div", { class: "setting wide" }, h("label", { for: "setting-stop" }, t("stopStrings")), area);
  }
}
