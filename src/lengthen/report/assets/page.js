// The page: its data, one tooltip for all figures, the theme.

const DATA = JSON.parse(document.getElementById("data").textContent);
const TIP = document.getElementById("tip");

function showTip(lines, x, y) {
  TIP.replaceChildren(...lines.map((line, index) => make(index ? "span" : "b", {}, line)));
  TIP.hidden = false;
  const room = document.documentElement.clientWidth, width = TIP.offsetWidth, height = TIP.offsetHeight;
  const left = x + 14 + width > room - 4 ? x - 14 - width : x + 14;
  const above = y + height + 8 > window.innerHeight ? y - height - 8 : y + 8;
  TIP.style.left = `${Math.max(4, Math.min(left, room - width - 4)) + window.scrollX}px`;
  TIP.style.top = `${Math.max(4, above) + window.scrollY}px`;
}

function hideTip() {
  TIP.hidden = true;
}

const CHARTS = {};
for (const root of document.querySelectorAll("[data-chart]")) {
  const spec = DATA.charts.find((chart) => chart.id === root.dataset.chart);
  CHARTS[spec.id] = new Chart(root, spec);
}
for (const root of document.querySelectorAll("[data-maps]")) drawMaps(root, root.dataset.maps, DATA.maps);

const THEME = document.getElementById("theme"), DARK = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return document.documentElement.dataset.theme || (DARK.matches ? "dark" : "light");
}

function nameTheme() {
  THEME.textContent = theme() === "dark" ? "Light" : "Dark";
}

THEME.hidden = false;
THEME.addEventListener("click", () => {
  document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
  nameTheme();
});
DARK.addEventListener("change", nameTheme);
nameTheme();

// On paper nothing can be unfolded: how a number was made is printed with it.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details.how:not([open])")];
  for (const one of folded) one.open = true;
});
addEventListener("afterprint", () => {
  for (const one of folded) one.open = false;
});
