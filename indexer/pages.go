// SPDX-License-Identifier: Apache-2.0

package indexer

import (
	"iter"
	"math/bits"
	"unsafe"
)

// pages stores things by number, from 1 on. A thing never moves, and its number is used
// again after it is dropped. Growth moves no thing, so its time does not depend on their
// number. Pages are kept for as long as anything is on any of them.
type pages[T any] struct {
	list []*page[T]
	room []uint32 // pages with a vacant place; the last one is used first
	used int      // numbers in use
}

type page[T any] struct {
	things [pageSize]T
	vacant [pageSize / 64]uint64
}

const pageSize = 128

// get returns the thing with a number, which may be vacant but must be below end.
func (p *pages[T]) get(id uint32) *T {
	id--
	return &p.list[id/pageSize].things[id%pageSize]
}

// at is get, but returns nil for 0 and for numbers from end on.
func (p *pages[T]) at(id uint32) *T {
	if id == 0 || id >= p.end() {
		return nil
	}
	return p.get(id)
}

// end returns a number above all numbers.
func (p *pages[T]) end() uint32 { return uint32(len(p.list)*pageSize) + 1 }

// add returns a vacant number, and the place of its thing.
func (p *pages[T]) add() (id uint32, thing *T) {
	if len(p.room) == 0 {
		p.room = append(p.room, uint32(len(p.list)))
		p.list = append(p.list, &page[T]{vacant: [pageSize / 64]uint64{^uint64(0), ^uint64(0)}})
	}
	number := p.room[len(p.room)-1]
	at := p.list[number]
	word := 0
	for at.vacant[word] == 0 {
		word++
	}
	i := word*64 + bits.TrailingZeros64(at.vacant[word])
	at.vacant[word] &= at.vacant[word] - 1
	if at.vacant == [pageSize / 64]uint64{} {
		p.room = p.room[:len(p.room)-1]
	}
	p.used++
	return number*pageSize + uint32(i) + 1, &at.things[i]
}

// drop makes a number vacant, and clears its thing.
func (p *pages[T]) drop(id uint32) {
	id--
	at := p.list[id/pageSize]
	clear(at.things[id%pageSize : id%pageSize+1])
	if at.vacant == [pageSize / 64]uint64{} {
		p.room = append(p.room, id/pageSize)
	}
	at.vacant[id%pageSize/64] |= 1 << (id % 64)
	// One page is kept, so that adding and dropping one thing does not allocate each time.
	if p.used--; p.used == 0 && len(p.list) > 1 {
		*p = pages[T]{}
	}
}

// all yields the things of all numbers, vacant ones included.
func (p *pages[T]) all() iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for id := uint32(1); id < p.end(); id++ {
			if !yield(p.get(id)) {
				return
			}
		}
	}
}

func (p *pages[T]) bytes() int {
	return heapSize(8*cap(p.list)) + heapSize(4*cap(p.room)) + len(p.list)*heapSize(int(unsafe.Sizeof(page[T]{})))
}
