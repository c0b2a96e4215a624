// SPDX-License-Identifier: Apache-2.0
// What needs attention, and what happened. The server writes all sentences: doctor and the alerts have the same words.
import { Table, ago, clip, clock, element, find, number, plain, put, several, workerName } from './dom.js'

const tones = { fault: ['✕', 'bad'], note: ['▲', 'warn'], good: ['●', 'good'] }
const days = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short' })
const most = 8 // items that are shown until "Show all" is pressed
const names = 5 // workers that an item names
const mostAlso = 5 // further causes of an item that are shown

// Items of several workers with the same cause are shown as one.
function grouped(items) {
  const groups = new Map()
  for (const item of items) {
    const key = JSON.stringify([item.kind, item.what, item.kind === 'replica' ? item.text : (item.cause ?? item.text), item.advice])
    groups.has(key) ? groups.get(key).push(item) : groups.set(key, [item])
  }
  return [...groups]
}

// further returns the further causes of an item; of several workers their names in one line.
function further(all) {
  if (all.length === 1) return (all[0].also ?? []).map((c) => ({ ...c, text: `Also: ${c.text}` }))
  const causes = all.flatMap((item) => item.also ?? [])
  if (causes.length === 0) return []
  return [{ text: `Also: ${[...new Set(causes.map((c) => c.what))].join(', ')}`, title: causes.slice(0, 20).map((c) => c.text).join('\n') }]
}

const label = (item) => (item.worker_id ? workerName(item, item.name) : item.model || '')

// since says when something began.
const since = (time, now) => (time ? `since ${moment(time, now)}, for ${ago(time, now)}` : '')

// moment shows a time, with its date unless that is today's.
function moment(time, now) {
  const [then, today] = [new Date(time), new Date(now)]
  const same = then.getDate() === today.getDate() && Math.abs(then - today) < 86_400_000
  return (same ? '' : `${days.format(then)} `) + clock(then)
}

export class Attention {
  // filter(text) shows the workers and events that match a text.
  constructor(filter) {
    this.filter = filter
    this.section = find('attention')
    this.list = this.section.querySelector('ul')
    this.shown = new Map() // elements by the key of their item
    this.rows = new Map() // items by worker and rank
    this.more = find('more')
    this.more.addEventListener('click', () => {
      this.all = true
      this.draw(this.items, this.now)
    })
  }

  // of returns the items about a worker.
  of(w) {
    return this.rows.get(`${w.worker_id}/${w.dp_rank}`) ?? []
  }

  // set takes the items of the server before the sections are drawn.
  set(items) {
    this.items = items
    this.rows = new Map()
    for (const item of items.filter((i) => i.kind === 'worker')) {
      const key = `${item.worker_id}/${item.dp_rank}`
      this.rows.set(key, [item, ...(item.also ?? [])])
    }
  }

  draw(items, now) {
    this.now = now
    const groups = grouped(items)
    const shown = this.all ? groups : groups.slice(0, most)
    const old = this.shown
    this.shown = new Map(shown.map(([key]) => [key, old.get(key) ?? this.item()]))
    if ([...old.keys()].join() !== [...this.shown.keys()].join()) this.list.replaceChildren(...[...this.shown.values()].map((i) => i.element))
    shown.forEach(([key, all]) => this.fill(this.shown.get(key), all, now))
    this.section.hidden = groups.length === 0
    this.more.hidden = shown.length === groups.length
    put(this.more, { text: `Show all ${number(groups.length)}` })
  }

  item() {
    const parts = {
      mark: element('span', { className: 'mark' }), what: element('button', { type: 'button', className: 'link text' }), since: element('span', { className: 'note since' }),
      advice: element('span'), also: element('div'), docs: element('a', { target: '_blank', rel: 'noreferrer' }, 'Read more'),
    }
    parts.element = element('li', {}, parts.mark, element('div', {}, element('p', {}, parts.what, ' ', parts.since), element('p', { className: 'advice' }, parts.advice, ' ', parts.docs), parts.also))
    parts.what.addEventListener('click', () => this.filter(parts.wanted))
    parts.what.dataset.field = 'text'
    parts.advice.dataset.field = 'advice'
    return parts
  }

  fill(parts, all, now) {
    const [first] = all
    const [symbol, tone] = tones[first.level] ?? tones.note
    const named = all.slice(0, names).map(label).join(', ') + (all.length > names ? ', …' : '')
    const text = all.length === 1 ? first.text : `${several(all.length, first.kind === 'model' ? 'model' : 'worker')}, ${first.what}: ${first.cause ?? ''} (${named})`
    const earliest = all.map((i) => i.since).filter(Boolean).sort()[0]
    parts.wanted = all.length === 1 ? label(first) : first.what
    put(parts.mark, { text: symbol, tone })
    put(parts.what, { text: clip(text, 400), value: all.length === 1 ? `${first.what}/${label(first)}` : first.what, title: all.map((i) => i.text).slice(0, 20).join('\n') })
    parts.what.disabled = !parts.wanted
    put(parts.since, { text: since(earliest, now), value: earliest })
    put(parts.advice, { text: first.advice ? clip(`What to do: ${first.advice}.`, 800) : '' })
    parts.docs.hidden = !first.docs
    if (first.docs && parts.docs.getAttribute('href') !== first.docs) parts.docs.href = first.docs
    parts.docs.ariaLabel = `Read more about ${first.what}`
    this.fillAlso(parts.also, further(all), now)
  }

  // fillAlso shows the further causes of an item.
  fillAlso(list, causes, now) {
    const shown = causes.slice(0, mostAlso)
    if (causes.length > mostAlso) shown.push({ text: `and ${causes.length - mostAlso} more`, title: causes.slice(mostAlso).map((c) => c.text).join('\n') })
    while (list.children.length > shown.length) list.lastChild.remove()
    while (list.children.length < shown.length) list.append(element('p', { className: 'also' }, element('span'), ' ', element('span', { className: 'note since' })))
    shown.forEach((c, i) => {
      const [text, began] = list.children[i].children
      put(text, { text: clip(c.text, 400), value: c.what, title: c.title ?? [c.text, c.advice].filter(Boolean).join('; ') })
      put(began, { text: since(c.since, now), value: c.since })
    })
  }
}

// Happened lists the events of workers, the newest first. matches(event) says which ones are shown.
export class Happened {
  constructor(matches) {
    this.matches = matches
    this.table = new Table(find('happened'), 'What happened to workers, newest first', [
      { name: 'Time', field: 'time', show: (e) => ({ text: moment(e.time, this.now), value: e.time, title: e.time }) },
      { name: 'Event', field: 'text', left: true, wrap: true, show: (e) => plain(clip(e.text), { tone: tones[e.level]?.[1] ?? '', title: e.text.length > 300 ? e.text : '' }) },
      { name: 'Model', field: 'model', left: true, show: (e) => plain(e.model) },
    ], (e) => `${e.time}/${e.worker_id ?? ''}/${e.what}/${e.text}`)
  }

  draw(list, now) {
    this.now = now
    this.table.fill(list.filter(this.matches), list.length ? 'No event matches the filter.' : 'Nothing has happened to a worker since the start.')
  }
}
