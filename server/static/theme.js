// Before the first paint: the theme chosen on an earlier visit. Absent means: as the system.
"use strict";
try {
  const theme = localStorage.getItem("noria.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // A browser that keeps nothing: as the system.
}
