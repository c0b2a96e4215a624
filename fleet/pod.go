// SPDX-License-Identifier: Apache-2.0

package fleet

import "reflect"

// isPod reports whether the member is the worker of a pod with this record. m may be nil. There may be thousands of
// pods, and one of them changes at a time.
func (m *member) isPod(r *Record) bool {
	return m != nil && m.static && r.Pod != nil && reflect.DeepEqual(m.record, *r)
}

// isSameProcess reports whether what is known of a configured worker's health holds for its new entry. m may be nil.
// A pod that becomes ready may have restarted: its next probe counts.
func (m *member) isSameProcess(now *member) bool {
	return m != nil && m.static && m.probed && now.probed && m.info.Address == now.info.Address &&
		m.record.NotReady == now.record.NotReady
}
