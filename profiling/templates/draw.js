"use strict";
// Figures are drawn when they come near the window, the others while the browser is idle, all of them before printing.
document.addEventListener("DOMContentLoaded", () => {
  const config = {
    displaylogo: false,
    responsive: true,
    showSendToCloud: false,
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "sendChartToCloud"],
  };
  const waiting = new Set(document.querySelectorAll(".plot"));

  const draw = (place) => {
    if (!waiting.delete(place)) return;
    watcher.unobserve(place);
    try {
      const figure = JSON.parse(document.getElementById(place.id + "-data").textContent);
      Plotly.newPlot(place, figure.data, figure.layout, config);
    } catch (error) {
      place.textContent = "This figure could not be drawn: " + error.message;
      console.error(error);
    }
    if (!waiting.size) document.documentElement.dataset.drawn = "all";
  };

  const watcher = new IntersectionObserver(
    (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => draw(entry.target)),
    { rootMargin: "300px" },
  );
  waiting.forEach((place) => watcher.observe(place));
  if (!waiting.size) document.documentElement.dataset.drawn = "all";

  const later = window.requestIdleCallback || ((work) => setTimeout(work, 50));
  const drawNext = () => {
    const [next] = waiting;
    if (!next) return;
    draw(next);
    later(drawNext);
  };
  later(drawNext);
  window.addEventListener("beforeprint", () => waiting.forEach(draw));
});
