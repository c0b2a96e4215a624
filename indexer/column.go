// SPDX-License-Identifier: Apache-2.0

package indexer

import "math/bits"

// column is the external hashes of a run of blocks, for all owners that name the
// blocks alike, whichever of them came first. A node has a main column, which
// counts for whoever is not listed with columns of his own, and any number of
// others.
//
// A live cell of a shared column is in the table under its external hash, and no
// two shared cells have the same one. So who looks for a hash has seen all that
// may be shared once he has seen one cell. Where owners name different blocks alike
// (by small numbers, say) the first has the shared cell, and the others' cells are
// in private columns, which are in the table under the hash and the owner together:
// there, too, is one cell at most.
//
// A cell is a block's place in the run. Splitting a node leaves its columns as
// they are, now of both parts, and so the table's entries too: who comes from the
// table goes along the parts (see [node.tail]) until it has come to the cell.
type column struct {
	ext  []uint64 // external hashes of the cells from base on
	live uint64   // the cells that count; their hashes are in the table
	node *node    // the node that it was made for
	who  int32    // the only owner that has used it since it was last empty, or anybody
	id   uint32
	refs uint32 // how often nodes name it, as main or in own
	base uint8
	// private means that its cells are in the table under their hashes and who,
	// and that nobody else ever uses it.
	private bool
	_       [10]byte // to fill a cache line
}

const anybody = -1

// key is where in the table a cell with a hash belongs.
func (c *column) key(hash uint64) uint64 {
	if c.private {
		return privateKey(hash, c.who)
	}
	return hash
}

func privateKey(hash uint64, who int32) uint64 { return hash + uint64(who+1)*0x9E3779B97F4A7C15 }

func (c *column) external(cell int) uint64 { return c.ext[cell-int(c.base)] }

// holds reports whether external is in a live cell, and in which.
func (c *column) holds(cell int, external uint64) bool {
	i := cell - int(c.base)
	return i >= 0 && i < len(c.ext) && c.ext[i] == external && c.live>>cell&1 != 0
}

// write puts the external hashes of blocks into the cells from cell on.
func (c *column) write(cell int, blocks []Block) {
	if len(c.ext) == 0 {
		c.base = uint8(cell)
	}
	from, to := min(cell, int(c.base)), max(cell+len(blocks), int(c.base)+len(c.ext))
	if from < int(c.base) || to-from > cap(c.ext) {
		room := to - from
		if len(c.ext) > 0 { // it will grow again
			room = max(room, len(c.ext)+len(c.ext)/4+2)
		}
		grown := make([]uint64, to-from, runCap(min(room, maxRun-from)))
		copy(grown[int(c.base)-from:], c.ext)
		c.ext, c.base = grown, uint8(from)
	}
	c.ext = c.ext[:to-from]
	for i := range blocks {
		c.ext[cell-from+i] = blocks[i].External
	}
}

// runCap rounds the capacity for a run up to what the allocator gives anyhow.
func runCap(n int) int {
	if n <= 32 {
		return (n + 1) &^ 1
	}
	return (n + 3) &^ 3
}

// columns gives out columns by number, from 1 on, from pages that are given back
// when nothing on them is used.
type columns struct {
	pages []*page
	room  []uint32 // pages with a free place; the last one is used first
	empty []uint32 // numbers of pages that are not there
}

type page struct {
	columns [pageColumns]column
	free    [pageColumns / 64]uint64
	used    int32
	listed  bool // in columns.room
}

const (
	pageColumns = 128
	// maxColumns is what fits into the 24 bits of a table's entry.
	maxColumns = 1 << 24
)

func (c *columns) get(id uint32) *column {
	id--
	return &c.pages[id/pageColumns].columns[id%pageColumns]
}

// full reports whether there may be no room for n more columns.
func (c *columns) full(n int) bool {
	return len(c.pages)-len(c.empty)+n >= maxColumns/pageColumns
}

// add returns a new column, which nothing names yet.
func (c *columns) add(n *node, who int32, private bool) *column {
	if len(c.room) == 0 {
		p := &page{listed: true, free: [pageColumns / 64]uint64{^uint64(0), ^uint64(0)}}
		if last := len(c.empty) - 1; last >= 0 {
			c.room = append(c.room, c.empty[last])
			c.pages[c.empty[last]] = p
			c.empty = c.empty[:last]
		} else {
			c.room = append(c.room, uint32(len(c.pages)))
			c.pages = append(c.pages, p)
		}
	}
	number := c.room[len(c.room)-1]
	p := c.pages[number]
	word := 0
	for p.free[word] == 0 {
		word++
	}
	i := word*64 + bits.TrailingZeros64(p.free[word])
	p.free[word] &= p.free[word] - 1
	if p.used++; p.used == pageColumns {
		p.listed = false
		c.room = c.room[:len(c.room)-1]
	}
	col := &p.columns[i]
	*col = column{node: n, who: who, id: number*pageColumns + uint32(i) + 1, private: private}
	return col
}

// drop takes away one of the names of a column, and frees it if that was the last.
func (c *columns) drop(col *column) {
	if col.refs--; col.refs > 0 {
		return
	}
	id := col.id - 1
	*col = column{}
	number := id / pageColumns
	p := c.pages[number]
	p.free[id%pageColumns/64] |= 1 << (id % 64)
	if !p.listed {
		p.listed = true
		c.room = append(c.room, number)
	}
	// The page in use stays, or one column coming and going would make pages.
	if p.used--; p.used == 0 && c.room[len(c.room)-1] != number {
		c.release(number)
	}
}

func (c *columns) release(number uint32) {
	for i, r := range c.room {
		if r == number {
			c.room[i] = c.room[len(c.room)-1]
			c.room = c.room[:len(c.room)-1]
			break
		}
	}
	c.pages[number] = nil
	c.empty = append(c.empty, number)
	if len(c.empty) == len(c.pages) {
		*c = columns{}
	}
}

func (c *columns) bytes() int {
	return heapSize(8*cap(c.pages)) + heapSize(4*cap(c.room)) + heapSize(4*cap(c.empty)) +
		(len(c.pages)-len(c.empty))*heapSize(pageColumns*columnBytes+24)
}
