// SPDX-License-Identifier: Apache-2.0
// Line charts of 10 minutes, an hour or a day, of all models or of one. A pointer on a chart shows the figures of that
// moment in the legends of all charts.
import { clock, element, milliseconds, number, percent, put, rate, svg } from './dom.js'

// The times that the charts can show, in ms, with the time between two samples and between two readings.
const spans = {
  '10m': { longest: 600_000, step: 2_000, every: 2_000 },
  '1h': { longest: 3_600_000, step: 15_000, every: 5_000 },
  '24h': { longest: 86_400_000, step: 300_000, every: 30_000 },
}
const live = spans['10m'] // what the feed has of all models
const size = { height: 132, left: 52, right: 2, top: 8, bottom: 18 }

// The lines: of(sample, step) returns the figure of a sample, or undefined if it has none.
const some = (n) => (n > 0 ? n : undefined)
const charts = [
  { title: 'Requests per second', show: rate, least: 1, area: true, lines: [{ name: 'ended', field: 'rate', of: (s, step) => s.requests / (step / 1000) }] },
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
    this.svg.addEventListener('pointermove', (event) => hover((event.offsetX - size.left) / this.width))
    this.svg.addEventListener('pointerleave', () => hover(undefined))
    this.figure = element('figure', {}, element('figcaption', {}, about.title), this.legend, this.svg)
  }

  // measure reads the width. It is not to be called while a section is drawn: the browser would lay the page out first.
  measure() {
    this.width = Math.max(1, this.svg.clientWidth - size.left - size.right)
  }

  draw(samples, now, span, step) {
    const { about, width } = this
    this.step = step
    const height = size.height - size.top - size.bottom
    const highest = Math.max(0, ...samples.flatMap((s) => about.lines.map((line) => line.of(s, step) ?? 0)))
    const top = about.most ?? ceiling(Math.max(about.least, highest))
    const x = (time) => (size.left + width * (1 - (now - time) / span)).toFixed(1)
    const y = (value) => (size.top + height * (1 - value / top)).toFixed(1)
    this.x = x
    about.lines.forEach((line, i) => {
      let [path, last, first] = ['', -Infinity, undefined]
      for (const s of samples) {
        const value = line.of(s, step)
        if (value === undefined) continue
        // A line breaks after five samples without a figure. It begins with a short dash, which also shows a figure alone.
        path += s.time_ms - last > 5 * step ? `M${x(s.time_ms)} ${y(value)}m-2 0h4m-2 0` : `L${x(s.time_ms)} ${y(value)}`
        first ??= s.time_ms
        last = s.time_ms
      }
      this.paths[i].setAttribute('d', path || `M${size.left} ${y(0)}h${width}`) // a line at zero if there is no figure
      this.paths[i].classList.toggle('none', path === '')
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
    const words = newest ? about.lines.map((line) => `${line.name} ${about.show(line.of(newest, step) ?? 0)}`).join(', ') : 'no requests'
    this.svg.setAttribute('aria-label', `${about.title} over ${Math.round(span / 60_000)} minutes. Newest: ${words}. Highest: ${about.show(highest)}.`)
  }

  // read shows the figures of a sample in the legend; at is undefined for the newest one.
  read(sample, at) {
    this.about.lines.forEach((line, i) => {
      const value = sample && line.of(sample, this.step)
      put(this.values[i], value === undefined ? {} : { text: this.about.show(value), value, title: String(value) })
    })
    this.cursor.style.display = at === undefined ? 'none' : ''
    if (at !== undefined) for (const key of ['x1', 'x2']) this.cursor.setAttribute(key, this.x(at))
  }
}

// Charts shows samples of the feed, or those of GET /v1/history if a model or a longer time is selected. get(path)
// requests a path of the API. changed is called after a selection.
export class Charts {
  constructor(parent, get, changed) {
    Object.assign(this, { get, samples: [], dense: [], span: '10m', series: null, loaded: -Infinity })
    this.charts = charts.map((about) => new Chart(about, (place) => this.hover(place)))
    this.moment = element('p', { className: 'note', id: 'moment' })
    parent.append(...this.charts.map((c) => c.figure))
    parent.append(this.moment)
    new ResizeObserver(() => {
      for (const chart of this.charts) chart.measure()
      this.draw(this.now)
    }).observe(parent)
    this.select = document.getElementById('series')
    for (const id of ['series', 'span']) {
      document.getElementById(id).addEventListener('change', () => {
        this.series = JSON.parse(this.select.value)
        this.span = document.getElementById('span').value
        this.read = []
        this.loaded = -Infinity
        this.draw(this.now)
        changed()
      })
    }
  }

  // offer takes the models and groups that had requests: [model, group], or [model] for all groups of a model.
  offer(pairs) {
    const several = new Set(pairs.filter(([, group]) => group).map(([model]) => model))
    const list = pairs.map(([model, group]) => (several.has(model) ? [model, group] : [model]))
    const all = [null, ...[...several].map((model) => [model]), ...list]
    const values = all.map((s) => JSON.stringify(s))
    if (values.join() === this.offered) return
    this.offered = values.join()
    const words = (s) => (!s ? 'all models' : s.length === 1 ? s[0] : `${s[0]}, ${s[1] ? `group ${s[1]}` : 'no group'}`)
    this.select.replaceChildren(...all.map((s, i) => element('option', { value: values[i] }, words(s))))
    this.select.value = values.includes(JSON.stringify(this.series)) ? JSON.stringify(this.series) : 'null'
  }

  // shows reports whether the selection has a model, and a group if that is given.
  shows(model, group) {
    return !this.series || (this.series[0] === model && (this.series.length === 1 || (group ?? this.series[1]) === this.series[1]))
  }

  // all shows all models again.
  all() {
    if (!this.series) return
    this.select.value = 'null'
    this.select.dispatchEvent(new Event('change'))
  }

  // add appends samples of the feed.
  add(samples) {
    this.samples.push(...samples)
    const newest = this.samples.at(-1)?.time_ms
    this.samples = this.samples.filter((s) => s.time_ms > newest - live.longest)
  }

  // load requests the history of the selection again if that is due.
  async load(now) {
    if (now - this.loaded < spans[this.span].every) return
    this.loaded = now
    const wanted = { span: this.span, ...(this.series && { model: this.series[0] }), ...(this.series?.length > 1 && { group: this.series[1] }) }
    const path = `v1/history?${new URLSearchParams(wanted)}`
    this.path = path
    try {
      const { samples } = await (await this.get(path)).json()
      if (this.path !== path) return
      this.read = samples
      this.failed = ''
    } catch (problem) {
      if (this.path === path) this.failed = `The history cannot be read: ${problem.message}`
    }
    this.draw(this.now)
  }

  // draw draws the time until now, by the clock of kvroute. Times without requests have no sample: they become empty ones.
  draw(now = Date.now()) {
    const { longest, step } = spans[this.span]
    const fed = this.span === '10m' && !this.series
    const samples = fed ? this.samples : (this.read ?? [])
    if (!fed) this.load(now)
    const newest = samples.at(-1)?.time_ms ?? now
    this.now = now
    this.step = step
    this.end = newest + step * Math.max(0, Math.floor((now - newest) / step))
    this.length = Math.max(longest / 5, Math.min(longest, this.end - (samples[0]?.time_ms ?? this.end)))
    const known = new Map(samples.map((s) => [Math.round((this.end - s.time_ms) / step), s]))
    this.dense = []
    for (let i = Math.floor(this.length / step); i >= 0; i--) this.dense.push(known.get(i) ?? { time_ms: this.end - i * step, requests: 0, failed: 0, prompt_tokens: 0 })
    for (const chart of this.charts) chart.draw(this.dense, this.end, this.length, step)
    Object.assign(this.moment.dataset, { newest: this.end, span: this.span, series: JSON.stringify(this.series) })
    this.hover(this.place)
  }

  // hover shows the figures at a place from 0 to 1 of the charts, or the newest ones.
  hover(place) {
    this.place = place
    const time = this.end - this.length * (1 - (place ?? 1))
    const sample = this.dense.findLast((s) => s.time_ms <= time + this.step / 2) ?? this.dense[0]
    for (const chart of this.charts) chart.read(sample, place === undefined ? undefined : sample?.time_ms)
    const failed = sample?.failed ? `, ${number(sample.failed)} failed` : ''
    put(this.moment, sample ? { text: this.failed || `${clock(sample.time_ms - this.step)} to ${clock(sample.time_ms)}${failed}`, value: sample.time_ms } : { text: '' })
  }
}
