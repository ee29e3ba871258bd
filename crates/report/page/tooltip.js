// One tooltip for all drawings. Its lines are text, never markup: recordings may contain anything.

const tooltip = document.getElementById("tooltip");

/** Shows lines beside a pointer; the first stands out. */
export function showTooltip(event, lines) {
  const rows = lines.filter(Boolean).map((line, at) => {
    const row = document.createElement("div");
    row.textContent = line;
    if (at === 0) row.className = "first";
    return row;
  });
  tooltip.replaceChildren(...rows);
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const top = event.clientY + 14 + height > innerHeight ? event.clientY - 14 - height : event.clientY + 14;
  tooltip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
}

export function hideTooltip() {
  tooltip.hidden = true;
}
