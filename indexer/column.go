// SPDX-License-Identifier: Apache-2.0

package indexer

// column has the external hashes of a run of blocks, for all owners that use the same
// hash for the same block. A node has a main column, which counts for the owners that are
// not listed, and any number of other columns.
//
// A live cell of a shared column is in the table under its external hash, and no two
// shared cells have the same hash. So a search ends at the first shared cell that
// matches. If owners use one hash for different blocks (for example small numbers), the
// first owner has the shared cell. The others' cells are in private columns, which are in
// the table under the hash and the owner together, at most one cell for each pair.
//
// A cell is a block's place in the run. Splitting a node changes neither its columns,
// which both parts then use, nor the table's entries. A search that comes from the table
// starts at the last part and follows the parents to the part that has the cell.
type column struct {
	ext   []uint64 // external hashes of the cells from base on
	live  uint64   // the cells in use; their hashes are in the table
	node  *node    // the node that the column was made for: now its last part, or removed from the tree
	owner int32    // the only owner that has used it since it was last empty, or anyOwner
	id    uint32
	refs  uint32 // references by nodes, as main or in listed
	base  uint8
	// private means that its cells are in the table under their hashes and the owner, and
	// that only this owner uses it.
	private bool
	_       [10]byte // fills a cache line
}

const anyOwner = -1

// key returns the key of a cell with a hash in the table.
func (c *column) key(hash uint64) uint64 {
	if c.private {
		return privateKey(hash, c.owner)
	}
	return hash
}

func privateKey(hash uint64, owner int32) uint64 { return hash + uint64(owner+1)*0x9E3779B97F4A7C15 }

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
		if len(c.ext) > 0 { // the column will grow again
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

// runCap rounds the capacity for a run up to the size that the allocator uses anyway.
func runCap(n int) int {
	if n <= 32 {
		return (n + 1) &^ 1
	}
	return (n + 3) &^ 3
}

// maxColumns is the number of columns that the 24 bits of a table's entry can name.
const maxColumns = 1 << columnBits

// newColumn returns a new column without references.
func (x *Index) newColumn(n *node, owner int32, private bool) *column {
	id, c := x.columns.add()
	*c = column{node: n, owner: owner, id: id, private: private}
	return c
}

// drop removes a reference to a column, and frees the column if that was the last.
func (x *Index) drop(c *column) {
	if c.refs--; c.refs == 0 {
		x.columns.drop(c.id)
		x.dropped = true
	}
}

// crowded reports whether there may be no room for n more columns. One page is kept in
// reserve, since the numbers of the last page need not be used in order.
func (x *Index) crowded(n int) bool { return x.columns.used+n > maxColumns-pageSize }
