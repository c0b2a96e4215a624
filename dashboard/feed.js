// SPDX-License-Identifier: Apache-2.0
// Feed reads the server-sent events of GET /v1/live with fetch, because an EventSource sends no token. The token is kept
// in this object only.

const silence = 15_000 // ms; a live stream has an event each second
const waits = [1, 2, 5, 10] // s between attempts

// parse reads JSON. Ids of workers and routers have up to 20 digits, which a number of JavaScript cannot hold: they become
// text. The pattern does not match inside a string, where each quotation mark follows a backslash.
export const parse = (text) => JSON.parse(text.replace(/("(?:worker_id|router_id)":)(\d+)/g, '$1"$2"'))

// Refusal is an answer that is not 200.
export class Refusal extends Error {
  constructor(status, message) {
    super(message)
    this.status = status
  }
}

export class Feed {
  #token = ''
  #retry = () => {}

  // section(name, data) gets each event; begin() is called when a stream starts. state(name, detail) gets connecting, live,
  // waiting (detail is a sentence), and login (detail is the error, or empty).
  constructor({ section, begin, state }) {
    Object.assign(this, { section, begin, state })
  }

  get hasToken() {
    return this.#token !== ''
  }

  // use sets the token and connects; an empty one forgets the token.
  use(token) {
    this.#token = token
    this.#retry()
    this.abort?.abort()
  }

  async get(path, options = {}) {
    const headers = { ...options.headers }
    if (this.#token) headers.Authorization = `Bearer ${this.#token}`
    const response = await fetch(path, { ...options, headers, cache: 'no-store' })
    if (response.ok) return response
    const answer = await response.json().catch(() => ({}))
    throw new Refusal(response.status, answer.error?.message ?? `status ${response.status}`)
  }

  async run() {
    for (let failures = 0; ; failures++) {
      const used = this.#token
      let detail = 'the connection was lost'
      this.state('connecting', '')
      try {
        await this.#read(() => (failures = 0))
      } catch (error) {
        if (error instanceof Refusal) detail = error.message
        if (this.#token === used && error.status === 401) {
          this.#token = ''
          this.state('login', used ? 'This token is not valid.' : '')
          await new Promise((resolve) => (this.#retry = resolve))
          continue
        }
      }
      if (this.#token !== used) continue
      const seconds = waits[Math.min(failures, waits.length - 1)]
      this.state('waiting', `${detail}; next attempt in ${seconds} s`)
      await new Promise((resolve) => {
        this.#retry = resolve
        setTimeout(resolve, 1000 * seconds)
      })
    }
  }

  async #read(connected) {
    this.abort = new AbortController()
    let timer
    const alive = () => {
      clearTimeout(timer)
      timer = setTimeout(() => this.abort.abort(), silence)
    }
    alive()
    try {
      const response = await this.get('v1/live', { headers: { Accept: 'text/event-stream' }, signal: this.abort.signal })
      this.begin()
      this.state('live', '')
      connected()
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
      for (let rest = ''; ; ) {
        const { value, done } = await reader.read()
        if (done) return
        alive()
        const events = (rest + value).split('\n\n')
        rest = events.pop()
        events.forEach((text) => this.#event(text))
      }
    } finally {
      clearTimeout(timer)
    }
  }

  #event(text) {
    const start = performance.now()
    const [, name] = text.match(/^event: (.*)$/m) ?? []
    const [, data] = text.match(/^data: (.*)$/m) ?? []
    if (name && data) this.section(name, parse(data))
    performance.measure('read', { start })
  }
}
