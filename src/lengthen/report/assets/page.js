// Draws the charts, lets one of a section's be chosen, and moves through points by keys. Colours are the style's.
const figures = JSON.parse(document.getElementById("data").textContent);
const options = {
  mode: "vega-lite", renderer: "svg", ast: true, actions: false, defaultStyle: false, tooltip: { disableDefaultStyle: true },
};

async function draw(figure, panels) {
  const plot = figure.querySelector(".plot");
  plot.replaceChildren();
  for (const spec of panels) {
    const place = plot.appendChild(document.createElement("div"));
    await vegaEmbed(place, spec, options);
    place.querySelector("svg").setAttribute("tabindex", "0");
    place.addEventListener("keydown", (event) => walk(event, place));
    place.addEventListener("click", (event) => tell(event.target)); // a finger does not hover
  }
}

function tell(mark) {
  const box = mark.getBoundingClientRect();
  const at = { bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 };
  mark.dispatchEvent(new PointerEvent("pointermove", at));
}

// Left and right go from point to point, up and down from curve to curve, Enter singles the curve out, Escape ends it.
function walk(event, place) {
  const marks = [...place.querySelectorAll(".mark-symbol.role-mark path, .mark-rect.role-mark path")];
  const now = marks.findIndex((mark) => mark.classList.contains("now"));
  const label = (at) => marks[at].__data__.datum.label;
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (event.key === "Enter" && now >= 0) marks[now].dispatchEvent(new MouseEvent("click", { bubbles: true }));
  if (event.key === "Escape") place.querySelector("svg").dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  if (!step || !marks.length) return;
  event.preventDefault();
  const beyond = (at) => (at + step + marks.length) % marks.length;
  let next = now < 0 ? 0 : beyond(now);
  if (["ArrowUp", "ArrowDown"].includes(event.key)) while (now >= 0 && next !== now && label(next) === label(now)) next = beyond(next);
  marks[now]?.classList.remove("now");
  marks[next].classList.add("now");
  tell(marks[next]);
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const choices = figures[figure.dataset.chart];
  const picker = figure.querySelector("select");
  picker?.addEventListener("change", () => draw(figure, choices[picker.value]));
  draw(figure, choices[0]);
}

const root = document.documentElement;
const button = document.getElementById("theme");
const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });
