// SPDX-License-Identifier: Apache-2.0

package kubetest

var Recorded = recorded
