// Sets a chosen theme before anything is drawn, so that the page does not flash in the other one. Not a module: those run
// after the first paint.
try {
  const theme = localStorage.getItem("henson-theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; the system's preference holds then.
}
