// Maps: a grid of cells a run, shaded from low to high; a choice of length where there are several.

function drawMaps(root, kind, all) {
  const maps = all.filter((one) => one.kind === kind);
  const lengths = [...new Set(maps.map((one) => one.length))].sort((a, b) => a - b);
  const grids = make("div", { class: "grids" });
  const pick = make("select", {}, ...lengths.map((length) => make("option", { value: length }, length.toLocaleString("en"))));
  pick.value = lengths.at(-1);
  const show = () => grids.replaceChildren(...maps.filter((one) => one.length === Number(pick.value)).map((one) => grid(one)));
  pick.addEventListener("change", show);
  const bar = make("div", { class: "controls" });
  if (lengths.length > 1) bar.append(make("label", {}, "length", pick));
  bar.append(make("span", { class: "scale" }, "0", make("i", {}), scaleEnd(maps), ` ${maps[0].shade}`));
  root.replaceChildren(bar, grids);
  show();
}

function largest(map) {
  return Math.max(...map.cells.flat().map((cell) => cell.v ?? 0), 0) || 1;
}

// Reach is shaded against the whole; weights, which are small, against the largest of all maps.
function scaleEnd(maps) {
  return maps[0].kind === "reach" ? "1" : number(Math.max(...maps.map(largest)));
}

function grid(map) {
  const reach = map.kind === "reach";
  const left = reach ? 52 : 34, top = reach ? 20 : 6, wide = reach ? 50 : 30, high = reach ? 26 : 13;
  const width = left + wide * map.columns.length + 2, height = top + high * map.rows.length + (reach ? 4 : 36);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": `${map.kind} of ${map.label} at ${map.length}` });
  const most = reach ? 1 : Number(largestOf(map.kind));
  map.columns.forEach((name, j) => {
    const x = left + wide * (j + 0.5), y = reach ? 14 : height - 26;
    const turn = reach ? {} : { transform: `rotate(-45 ${x} ${y})` };
    svg.append(make("text", { x, y, "text-anchor": reach ? "middle" : "end", ...turn }, name));
  });
  map.cells.forEach((cells, i) => {
    svg.append(make("text", { x: left - 5, y: top + high * (i + 0.5) + 4, "text-anchor": "end" }, map.rows[i]));
    cells.forEach((cell, j) => {
      const share = cell.v === null ? 0 : Math.min(1, Math.max(0, cell.v / most)), tone = Math.round(100 * (reach ? share : Math.sqrt(share)));
      const box = make("rect", { class: "cell", x: left + wide * j, y: top + high * i, width: wide, height: high });
      box.style.fill = `color-mix(in srgb, var(--high) ${tone}%, var(--low))`;
      const words = [map.label, `${map.rows[i]}, ${map.columns[j]}`, cell.tip];
      box.addEventListener("pointerenter", (event) => showTip(words, event.clientX, event.clientY));
      box.addEventListener("pointerleave", hideTip);
      box.append(make("title", {}, words.join(" · ")));
      svg.append(box);
      if (cell.t) {
        const text = make("text", { class: "value", x: left + wide * (j + 0.5), y: top + high * (i + 0.5) + 4, "pointer-events": "none" }, cell.t);
        text.style.fill = tone > 50 ? "var(--back)" : "var(--fore)";
        svg.append(text);
      }
    });
  });
  return make("figure", {}, make("figcaption", {}, map.label), svg);
}

function largestOf(kind) {
  return Math.max(...DATA.maps.filter((one) => one.kind === kind).map(largest));
}
