// What opens and closes beside the conversation: the list at the left (on narrow screens) and the panel at the right.

import { byId } from "./dom.js";

const KEY = "noria.panel";

export class Panels {
  constructor(onShow) {
    this.onShow = onShow;
    this.shown = null; // "server", "settings" or nothing
    for (const name of ["server", "settings"]) {
      byId(`tab-${name}`).addEventListener("click", () => this.show(name));
      byId(`show-${name}`).addEventListener("click", () => this.toggle(name));
    }
    byId("status").addEventListener("click", () => this.toggle("server"));
    byId("close-panel").addEventListener("click", () => this.show(null));
    byId("open-sidebar").addEventListener("click", () => this.openSidebar());
    byId("close-sidebar").addEventListener("click", () => this.closeSidebar());
    byId("veil").addEventListener("click", () => this.closeAll());
  }

  toggle(name) {
    this.show(this.shown === name ? null : name);
  }

  show(name) {
    this.shown = name;
    byId("panel").hidden = !name;
    for (const each of ["server", "settings"]) {
      byId(`${each}-view`).hidden = each !== name;
      byId(`tab-${each}`).setAttribute("aria-selected", String(each === name));
      byId(`show-${each}`).setAttribute("aria-expanded", String(each === name));
    }
    byId("app").classList.toggle("has-panel", Boolean(name));
    this.updateVeil();
    try {
      localStorage.setItem(KEY, name ?? "");
    } catch {
      // not kept
    }
    if (name) this.onShow(name);
  }

  /** As on the last visit, where there is room beside the conversation. */
  restore() {
    let name = "";
    try {
      name = localStorage.getItem(KEY) ?? "";
    } catch {
      // not kept
    }
    this.show(
      matchMedia("(min-width: 72rem)").matches && ["server", "settings"].includes(name) ? name : null,
    );
  }

  openSidebar() {
    byId("app").classList.add("has-sidebar");
    this.updateVeil();
    byId("new").focus();
  }

  closeSidebar() {
    byId("app").classList.remove("has-sidebar");
    this.updateVeil();
  }

  closeAll() {
    this.closeSidebar();
    this.show(null);
  }

  updateVeil() {
    const { classList } = byId("app");
    byId("veil").hidden = !classList.contains("has-panel") && !classList.contains("has-sidebar");
  }
}
