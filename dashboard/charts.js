// SPDX-License-Identifier: Apache-2.0
// Line charts of the last 10 minutes. A pointer on a chart shows the figures of that moment in the legends of all charts.
import { clock, compact, element, milliseconds, percent, put, rate } from './dom.js'

const [longest, shortest] = [600_000, 120_000] // ms that the charts show
const step = 2_000 // ms between samples
const size = { height: 132, left: 52, right: 2, top: 8, bottom: 18 }

const svg = (name, attributes = {}) => {
  const e = document.createElementNS('http://www.w3.org/2000/svg', name)
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value)
  return e
}

// The lines: of(sample) returns the figure of a sample, or undefined if it has none.
const some = (n) => (n > 0 ? n : undefined)
const charts = [
  { title: 'Requests per second', show: rate, least: 1, area: true, lines: [{ name: 'ended', field: 'rate', of: (s) => s.requests / (step / 1000) }] },
  {
    title: 'Time to first token', show: milliseconds, least: 10,
    lines: [{ name: 'mean', field: 'ttft_ms', of: (s) => some(s.ttft_ms) }, { name: 'p90', field: 'ttft_p90_ms', of: (s) => some(s.ttft_p90_ms) }],
  },
  {
    title: 'Cached share of prompt tokens', show: percent, most: 1,
    lines: [
      { name: 'chosen worker', field: 'cached_share', of: (s) => (s.prompt_tokens > 0 ? s.cached_tokens / s.prompt_tokens : undefined) },
      { name: 'mean of all', field: 'mean_share', of: (s) => (s.prompt_tokens > 0 ? s.mean_cached_tokens / s.prompt_tokens : undefined) },
    ],
  },
]

// ceiling returns the next round number.
function ceiling(n) {
  const power = 10 ** Math.floor(Math.log10(n))
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((m) => m * power >= n * 0.9999)
}

class Chart {
  constructor(about, hover) {
    this.about = about
    this.legend = element('p', { className: 'legend' })
    this.values = about.lines.map((line, i) => {
      const value = element('b', { className: `line-${i}` })
      value.dataset.field = line.field
      this.legend.append(element('span', {}, element('i', { className: `line-${i}` }), `${line.name} `, value))
      return value
    })
    this.svg = svg('svg', { role: 'img', height: size.height, width: '100%' })
    this.grid = [0, 0.5, 1].map(() => svg('line', { class: 'grid' }))
    this.ticks = [0, 0.5, 1].map(() => svg('text', { class: 'tick', x: size.left - 8, 'text-anchor': 'end' }))
    this.times = ['start', 'middle', 'end'].map((anchor) => svg('text', { class: 'tick', y: size.height - 4, 'text-anchor': anchor }))
    this.fillPath = svg('path', { class: 'area' })
    this.paths = about.lines.map((_, i) => svg('path', { class: `path line-${i}` }))
    this.cursor = svg('line', { class: 'cursor', y1: size.top, y2: size.height - size.bottom })
    this.svg.append(...this.grid, this.fillPath, ...this.paths.toReversed(), ...this.ticks, ...this.times, this.cursor)
    this.svg.addEventListener('pointermove', (event) => hover((event.offsetX - size.left) / this.width()))
    this.svg.addEventListener('pointerleave', () => hover(undefined))
    this.figure = element('figure', {}, element('figcaption', {}, about.title), this.legend, this.svg)
  }

  width() {
    return Math.max(1, this.svg.clientWidth - size.left - size.right)
  }

  draw(samples, now, span) {
    const { about } = this
    const width = this.width()
    const height = size.height - size.top - size.bottom
    const highest = Math.max(0, ...samples.flatMap((s) => about.lines.map((line) => line.of(s) ?? 0)))
    const top = about.most ?? ceiling(Math.max(about.least, highest))
    const x = (time) => (size.left + width * (1 - (now - time) / span)).toFixed(1)
    const y = (value) => (size.top + height * (1 - value / top)).toFixed(1)
    this.x = x
    about.lines.forEach((line, i) => {
      let [path, last, first] = ['', -Infinity, undefined]
      for (const s of samples) {
        const value = line.of(s)
        if (value === undefined) continue
        // A line breaks after 10 s without a figure. It begins with a short dash, which also shows a figure alone.
        path += s.time_ms - last > 10_000 ? `M${x(s.time_ms)} ${y(value)}m-2 0h4m-2 0` : `L${x(s.time_ms)} ${y(value)}`
        first ??= s.time_ms
        last = s.time_ms
      }
      this.paths[i].setAttribute('d', path)
      if (about.area) this.fillPath.setAttribute('d', path && !path.includes('M', 1) ? `${path}L${x(last)} ${y(0)}L${x(first)} ${y(0)}Z` : '')
    })
    this.grid.forEach((line, i) => {
      for (const [key, value] of Object.entries({ x1: size.left, x2: size.left + width, y1: y((top * i) / 2), y2: y((top * i) / 2) })) line.setAttribute(key, value)
    })
    this.ticks.forEach((tick, i) => {
      tick.textContent = i === 0 ? '0' : about.show((top * i) / 2)
      tick.setAttribute('y', +y((top * i) / 2) + 4)
    })
    this.times.forEach((label, i) => {
      label.setAttribute('x', size.left + (width * i) / 2)
      label.textContent = clock(now - span + (span * i) / 2)
    })
    const newest = samples.at(-1)
    const words = newest ? about.lines.map((line) => `${line.name} ${about.show(line.of(newest) ?? 0)}`).join(', ') : 'no requests'
    this.svg.setAttribute('aria-label', `${about.title} over ${Math.round(span / 60_000)} minutes. Newest: ${words}. Highest: ${about.show(highest)}.`)
  }

  // read shows the figures of a sample in the legend; at is undefined for the newest one.
  read(sample, at) {
    this.about.lines.forEach((line, i) => {
      const value = sample && line.of(sample)
      put(this.values[i], value === undefined ? {} : { text: this.about.show(value), value })
    })
    this.cursor.style.display = at === undefined ? 'none' : ''
    if (at !== undefined) for (const key of ['x1', 'x2']) this.cursor.setAttribute(key, this.x(at))
  }
}

export class Charts {
  constructor(parent) {
    this.samples = []
    this.dense = []
    this.charts = charts.map((about) => new Chart(about, (place) => this.hover(place)))
    this.moment = element('p', { className: 'note', id: 'moment' })
    parent.append(...this.charts.map((c) => c.figure))
    parent.append(this.moment)
    new ResizeObserver(() => this.draw(this.now)).observe(parent)
  }

  // add appends samples that follow those it has.
  add(samples) {
    this.samples.push(...samples)
    const newest = this.samples.at(-1)?.time_ms
    this.samples = this.samples.filter((s) => s.time_ms > newest - longest)
  }

  // draw draws the time until now, by the clock of kvroute. Times without requests have no sample: they become empty ones.
  draw(now = Date.now()) {
    const newest = this.samples.at(-1)?.time_ms ?? now
    this.now = now
    this.end = newest + step * Math.max(0, Math.floor((now - newest) / step))
    this.span = Math.max(shortest, Math.min(longest, this.end - (this.samples[0]?.time_ms ?? this.end)))
    const known = new Map(this.samples.map((s) => [Math.round((this.end - s.time_ms) / step), s]))
    this.dense = []
    for (let i = Math.max(0, ...known.keys()); i >= 0; i--) {
      if (i * step <= this.span) this.dense.push(known.get(i) ?? { time_ms: this.end - i * step, requests: 0, failed: 0, prompt_tokens: 0 })
    }
    for (const chart of this.charts) chart.draw(this.dense, this.end, this.span)
    this.moment.dataset.newest = this.end
    this.hover(this.place)
  }

  // hover shows the figures at a place from 0 to 1 of the charts, or the newest ones.
  hover(place) {
    this.place = place
    const time = this.end - this.span * (1 - (place ?? 1))
    const sample = this.dense.findLast((s) => s.time_ms <= time + step / 2) ?? this.dense[0]
    for (const chart of this.charts) chart.read(sample, place === undefined ? undefined : sample?.time_ms)
    const failed = sample?.failed ? `, ${compact(sample.failed)} failed` : ''
    put(this.moment, sample ? { text: `${clock(sample.time_ms - step)} to ${clock(sample.time_ms)}${failed}`, value: sample.time_ms } : { text: '' })
  }
}
