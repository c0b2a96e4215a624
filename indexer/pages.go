// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"iter"
	"math/bits"
	"unsafe"
)

// pages keeps things by number, from 1 on. They stay where they are, numbers are used
// again, and pages on which nothing is used are given back; to grow takes no longer
// for how many there are.
type pages[T any] struct {
	list  []*page[T]
	room  []uint32 // pages with a free place; the last one is used first
	empty []uint32 // numbers of pages that are not there
}

type page[T any] struct {
	things [pageSize]T
	free   [pageSize / 64]uint64
	used   int32
	listed int32 // where in pages.room, or -1
}

const pageSize = 128

// get returns the thing with a number, which must be used.
func (p *pages[T]) get(id uint32) *T {
	id--
	return &p.list[id/pageSize].things[id%pageSize]
}

// at is get, or nil if there is no page for the number.
func (p *pages[T]) at(id uint32) *T {
	if int(id-1)/pageSize >= len(p.list) || p.list[(id-1)/pageSize] == nil {
		return nil
	}
	return p.get(id)
}

// size returns how many numbers there are on the pages, used or not, and end what is
// above all numbers.
func (p *pages[T]) size() int   { return (len(p.list) - len(p.empty)) * pageSize }
func (p *pages[T]) end() uint32 { return uint32(len(p.list)*pageSize) + 1 }

// add returns a free number, and where what goes by it is to be.
func (p *pages[T]) add() (id uint32, thing *T) {
	if len(p.room) == 0 {
		fresh := &page[T]{free: [pageSize / 64]uint64{^uint64(0), ^uint64(0)}}
		if last := len(p.empty) - 1; last >= 0 {
			p.room = append(p.room, p.empty[last])
			p.list[p.empty[last]] = fresh
			p.empty = p.empty[:last]
		} else {
			p.room = append(p.room, uint32(len(p.list)))
			p.list = append(p.list, fresh)
		}
	}
	number := p.room[len(p.room)-1]
	at := p.list[number]
	word := 0
	for at.free[word] == 0 {
		word++
	}
	i := word*64 + bits.TrailingZeros64(at.free[word])
	at.free[word] &= at.free[word] - 1
	if at.used++; at.used == pageSize {
		at.listed = -1
		p.room = p.room[:len(p.room)-1]
	}
	return number*pageSize + uint32(i) + 1, &at.things[i]
}

// drop frees a number, and empties what went by it.
func (p *pages[T]) drop(id uint32) {
	id--
	number := id / pageSize
	at := p.list[number]
	clear(at.things[id%pageSize : id%pageSize+1])
	at.free[id%pageSize/64] |= 1 << (id % 64)
	if at.listed < 0 {
		at.listed = int32(len(p.room))
		p.room = append(p.room, number)
	}
	// The page in use stays, or one thing coming and going would make pages.
	if at.used--; at.used > 0 || int(at.listed) == len(p.room)-1 {
		return
	}
	last := len(p.room) - 1
	p.room[at.listed] = p.room[last]
	p.list[p.room[last]].listed = at.listed
	p.room = p.room[:last]
	p.list[number] = nil
	if p.empty = append(p.empty, number); len(p.empty) == len(p.list) {
		*p = pages[T]{}
	}
}

// all yields what is on the pages, used or not.
func (p *pages[T]) all() iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for _, at := range p.list {
			for i := 0; at != nil && i < pageSize; i++ {
				if !yield(&at.things[i]) {
					return
				}
			}
		}
	}
}

func (p *pages[T]) bytes() int {
	return heapSize(8*cap(p.list)) + heapSize(4*cap(p.room)) + heapSize(4*cap(p.empty)) +
		(len(p.list)-len(p.empty))*heapSize(int(unsafe.Sizeof(page[T]{})))
}
